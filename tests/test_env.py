from pathlib import Path

from rankmoe import env


def test_the_cache_directory_is_the_chosen_one_else_the_users(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.delenv("RANKMOE_CACHE_DIR", raising=False)
    assert env.cache_directory() == Path("/somewhere/rankmoe")
    monkeypatch.setenv("RANKMOE_CACHE_DIR", "/elsewhere")
    assert env.cache_directory() == Path("/elsewhere")


def test_programmatic_launch_is_on_unless_switched_off(monkeypatch):
    monkeypatch.delenv("RANKMOE_PDL", raising=False)
    assert env.uses_programmatic_launch()
    monkeypatch.setenv("RANKMOE_PDL", "0")
    assert not env.uses_programmatic_launch()


def test_every_variable_is_read_here_and_nowhere_else():
    package = Path(env.__file__).parent
    readers = {path.name for path in package.rglob("*.py") if "os.environ" in path.read_text()}
    assert readers == {"env.py"}


def test_batch_invariance_is_off_unless_the_variable_is_one(monkeypatch):
    monkeypatch.delenv("RANKMOE_BATCH_INVARIANT", raising=False)
    assert not env.is_batch_invariant()
    for value, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("RANKMOE_BATCH_INVARIANT", value)
        assert env.is_batch_invariant() is expected
