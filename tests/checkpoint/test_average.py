"""Averages, against numpy in float64."""

import resource

import numpy as np
import pytest
from safetensors.numpy import load_file

from kaiyuan.checkpoint.average import average, choose, weights_of
from kaiyuan.checkpoint.describe import checkpoints_folder, describe_checkpoint, iteration_folder
from kaiyuan.checkpoint.export import export
from kaiyuan.checkpoint.parity import compare_logits
from kaiyuan.errors import UserError


@pytest.fixture(scope="module")
def weights(run, tmp_path_factory):
    """The weights after each saved iteration, as numpy reads them."""
    folder = tmp_path_factory.mktemp("iterations")
    checkpoints = checkpoints_folder(run)
    out = {}
    for iteration in (2, 4, 6, 8):
        info = describe_checkpoint(iteration_folder(checkpoints, iteration))
        export(info, folder / str(iteration), "float32")
        (shard,) = (folder / str(iteration)).glob("*.safetensors")
        out[iteration] = load_file(shard)
    return out


def averaged_weights(run, chosen, folder, **options):
    average(run, chosen, folder / "average", **options)
    export(describe_checkpoint(folder / "average"), folder / "hf", "float32")
    (shard,) = (folder / "hf").glob("*.safetensors")
    return load_file(shard)


def assert_is_mean(result, weights, shares):
    for name, tensor in result.items():
        stack = np.stack([weights[i][name].astype(np.float64) for i in shares])
        mean = np.average(stack, axis=0, weights=list(shares.values()))
        # One unit in the last place of fp32.
        np.testing.assert_array_max_ulp(tensor, mean.astype(np.float32), maxulp=1)
        assert not np.array_equal(tensor, weights[8][name])


def test_mean_of_the_last(run, weights, tmp_path):
    chosen = choose(run, 4)
    assert chosen == [2, 4, 6, 8]
    result = averaged_weights(run, chosen, tmp_path)
    assert_is_mean(result, weights, {2: 1, 4: 1, 6: 1, 8: 1})
    assert "| 6 | 0.25 |" in (tmp_path / "hf" / "README.md").read_text()


def test_mean_of_a_list_with_exponential_weights(run, weights, tmp_path):
    chosen = choose(run, None, [8, 2, 6])
    result = averaged_weights(run, chosen, tmp_path, decay=0.5)
    assert_is_mean(result, weights, {2: 1, 6: 2, 8: 4})


@pytest.mark.slow
def test_megatron_and_transformers_agree_on_an_average(run, tokens, tmp_path):
    averaged_weights(run, [6, 8], tmp_path)
    info = describe_checkpoint(tmp_path / "average")
    assert compare_logits(info, tmp_path / "hf", tokens) <= 1e-5


def test_weights():
    assert weights_of(4) == [0.25] * 4
    assert weights_of(3, 0.5) == [1 / 7, 2 / 7, 4 / 7]
    with pytest.raises(UserError, match="decay must be above 0"):
        weights_of(3, 0)


def test_too_few_checkpoints_are_counted(run):
    with pytest.raises(UserError, match="has 4 complete checkpoints, not 8: 2, 4, 6, 8"):
        choose(run, 8)
    with pytest.raises(UserError, match="no checkpoint 5: there are 2, 4, 6, 8"):
        choose(run, None, [4, 5])
    with pytest.raises(UserError, match="not each of them once"):
        choose(run, None, [4, 4])
    with pytest.raises(UserError, match="say how many"):
        choose(run, None)
    with pytest.raises(UserError, match="exclude each other"):
        choose(run, 2, [4])


@pytest.mark.parametrize("most", [0, 1000, 200_000])
def test_a_full_disk_is_named_by_the_output(run, most, tmp_path):
    """Of a file over the limit the kernel says what it says of a full disk, in other words."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        with pytest.raises(UserError, match=f"cannot write {tmp_path / 'average'}.*too large"):
            average(run, [6, 8], tmp_path / "average")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())
