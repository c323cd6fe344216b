from hypothesis import settings

# Fixed examples: a run fails for a change of the code, never for a new roll of the dice.
settings.register_profile("rankmoe", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("rankmoe")
