"""With TransformerEngine and Apex, or without: our layers train the same."""

import itertools

import numpy as np
import pytest

from .conftest import ROOT
from .engine import losses, train

SHORT = ("phase1.max_samples=32", "lr_warmup_samples=16", "save_interval=2")


@pytest.fixture(scope="module")
def trained(demo, make_params, tmp_path_factory):
    """Return a function that trains four steps where so many of the packages are installed.

    The last two steps are done by a process that goes on from the checkpoint, where `then` is
    installed.
    """
    params = make_params(["phase1"])

    def trained(packages, then=None):
        run = tmp_path_factory.mktemp("with") / "run"
        data, path = demo.folder / "data", [ROOT / "tests" / "stand_ins"]
        for names, more in (
            (packages, ["exit_interval=2"]),
            (packages if then is None else then, []),
        ):
            installed = {"KAIYUAN_STAND_IN": " ".join(names)}
            train(run, data, params, *SHORT, *more, environment=installed, path=path)
        return np.array(losses(run), float), (run / "logs" / "phase1-node0.log").read_text()

    return trained


@pytest.mark.slow
def test_the_same_losses_with_any_of_them(trained):
    without, log = trained(())
    assert len(without) == 4
    assert "the stand-in's FusedAdam" not in log
    assert without[-1] < without[0]
    names = ("transformer_engine", "apex")
    for packages in [c for n in (1, 2) for c in itertools.combinations(names, n)]:
        mine, log = trained(packages)
        np.testing.assert_allclose(mine, without, rtol=0, atol=1e-5, err_msg=str(packages))
        assert "the stand-in's FusedAdam is used" in log


@pytest.mark.slow
def test_either_goes_on_from_the_checkpoint_of_the_other(trained):
    without, _ = trained(())
    for first, then in ((), ("transformer_engine",)), (("transformer_engine",), ()):
        mine, log = trained(first, then)
        np.testing.assert_allclose(mine, without, rtol=0, atol=1e-5, err_msg=f"{first} {then}")
        assert "the stand-in's FusedAdam is used" in log
