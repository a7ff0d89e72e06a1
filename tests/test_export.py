"""An export of a saved state is the model that the run had then."""

import argparse
import shutil
from types import SimpleNamespace

import pytest
from jobs import settings, train, weights
from ranks import run_ranks
from safetensors.torch import load_file

import run
from tools import export


@pytest.fixture(scope="module")
def trained(tiny, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    return train(settings(tiny, files, out, num_steps=3, run=dict(save_every=1, keep=3)))


def exported(directory, out, step=None, world_size=1, best=False):
    def job():
        export.main(argparse.Namespace(run=directory, out=out, step=step, best=best))

    run_ranks(world_size, job)
    return load_file(out / "model.safetensors")


@pytest.fixture(autouse=True)
def joined(monkeypatch):
    from jobs import joined

    monkeypatch.setattr(run, "init_distributed", joined)


def test_the_newest_state_is_what_the_run_wrote_at_its_end_to_a_bit_and_a_file(trained, tmp_path):
    found = exported(trained, tmp_path / "out", world_size=2)
    expected = weights(trained)
    assert found.keys() == expected.keys()
    assert all(x.equal(expected[name]) for name, x in found.items())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in (trained / "hf").iterdir()}


def test_another_step_is_the_model_of_that_step(tiny, files, trained, tmp_path):
    found = exported(trained, tmp_path / "out", step=2)
    earlier = train(settings(tiny, files, tmp_path / "short", num_steps=2))
    assert all(x.equal(found[name]) for name, x in weights(earlier).items())
    assert not all(x.equal(found[name]) for name, x in weights(trained).items())


def test_the_best_state_by_evaluation_is_kept_beside_the_newest_and_can_be_exported(
    tiny, files, tmp_path
):
    """Evaluated after 0, 1, 2 and 4 steps, the last time as the run ends."""
    rewards = iter([0.1, 0.3, 0.7, 0.7, 0.5])

    def evaluated(*_):
        return [[SimpleNamespace(rewards=[next(rewards)])]]

    changes = dict(num_steps=4, eval_every=1, eval_paths=(str(files / "3.jsonl"),))
    args = settings(tiny, files, tmp_path, run=dict(save_minutes=10.0), **changes)
    directory = train(args, **{"sampling.evaluate": evaluated})
    kept = [path.name for part in ("best", "checkpoints") for path in (directory / part).iterdir()]
    assert kept == ["step-000002", "step-000004"]
    found = exported(directory, tmp_path / "out", best=True)
    earlier = train(settings(tiny, files, tmp_path / "short", num_steps=2))
    assert all(x.equal(found[name]) for name, x in weights(earlier).items())
    assert not all(x.equal(found[name]) for name, x in weights(directory).items())


def test_what_cannot_be_exported_is_refused_in_a_line_and_nothing_is_written(trained, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "model.safetensors").touch()
    empty = tmp_path / "empty"
    shutil.copytree(trained, empty, ignore=shutil.ignore_patterns("step-*"))
    torn = tmp_path / "torn"
    other = tmp_path / "other"
    for directory, text in ((torn, '{"seed": '), (other, '{"seed": 1, "model_path": "x"}')):
        directory.mkdir()
        (directory / "config.json").write_text(text)
    for directory, out, step, message in [
        (trained, full, None, "full: is not empty; give another directory"),
        (tmp_path, tmp_path / "new", None, "config.json: no such file; give an earlier run's"),
        (torn, tmp_path / "new", None, "torn/config.json: is not a JSON object; give"),
        (other, tmp_path / "new", None, "other/config.json: has no model; give the directory of"),
        (trained, tmp_path / "new", 7, "has no saved state of step 7; there are: 1, 2, 3"),
        (empty, tmp_path / "new", None, "has no saved state; there are: none"),
    ]:
        with pytest.raises(SystemExit, match=message):
            exported(directory, out, step)
    with pytest.raises(SystemExit, match="has no best state; a run keeps one with --eval-every"):
        exported(trained, tmp_path / "new", best=True)
    assert not (tmp_path / "new").exists() and (full / "model.safetensors").exists()
