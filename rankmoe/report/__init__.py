"""`rankmoe report`: benchmark records as one HTML page that needs nothing from outside."""
