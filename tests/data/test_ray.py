"""Ray gives the same bytes as local processes; with a real local Ray."""

import pytest

from kaiyuan.data.convert import convert
from kaiyuan.data.verify import verify
from kaiyuan.errors import UserError
from tests.data.conftest import write_parquet

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_same_manifest_as_local(cluster, ranked, small, tmp_path):
    local = convert([ranked], tmp_path / "local", small.folder, order="rank", workers=1)
    options = {"order": "rank", "executor": "ray"}
    remote = convert([ranked], tmp_path / "ray", small.folder, **options)
    assert remote == local  # sizes and hashes of every file among it
    verify(tmp_path / "ray")


def test_mistake_is_one_sentence(cluster, small, tmp_path):
    write_parquet(tmp_path / "in.parquet", text=["a", "b"], rank=[1, None])
    with pytest.raises(UserError, match="row 1 has no rank"):
        convert([tmp_path / "in.parquet"], tmp_path / "out", small.folder, order="rank",
                executor="ray")  # fmt: skip
    assert not (tmp_path / "out/manifest.json").exists()
