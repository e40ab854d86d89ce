"""The arithmetic of intervals by hand, and a trace that torch's profiler wrote."""

import gzip
import json

import pytest

from kaiyuan.errors import UserError
from kaiyuan.profiling.trace import difference, kind_of, read_trace, summarize, summary_text, union


def test_union_and_difference_by_hand():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    # Of 0-10 and 12-14, what 2-3, 9-13 and 20-30 leave.
    assert difference([(0, 10), (12, 14)], [(9, 13), (2, 3), (20, 30)]) == [
        *((0, 2), (3, 9), (13, 14))
    ]
    assert difference([(0, 1)], []) == [(0, 1)]
    assert difference([(1, 2)], [(0, 3)]) == []
    # One hole over the seam of two intervals.
    assert difference([(0, 4), (5, 9)], [(3, 6)]) == [(0, 3), (6, 9)]


def test_summary_by_hand():
    # stream 7:  gemm 0-4      flash 4-6               adam 10-11
    # stream 9:        nccl 3-5      nccl 5.5-8   nccl 9-10.5
    summary = summarize(
        [
            ("nvjet_hsh_256x128", 0, 4, 7),
            ("flash_fwd_sm90", 4, 6, 7),
            ("multi_tensor_apply_kernel<Adam>", 10, 11, 7),
            ("ncclDevKernel_ReduceScatter_Sum_f32", 3, 5, 9),
            ("ncclDevKernel_ReduceScatter_Sum_f32", 5.5, 8, 9),
            ("ncclDevKernel_AllGather", 9, 10.5, 9),
        ]
    )
    assert summary.span == 11
    assert summary.busy == {
        "communication": 2 + 2.5 + 1.5,
        "attention": 2,
        "matrix products": 4,
        "optimizer": 1,
    }
    assert summary.communication == 6
    assert summary.exposed_communication == 2 + 1  # 6-8 and 9-10
    assert summary.exposed_share == pytest.approx(3 / 11)
    assert summary.idle == 1  # 8-9
    [gap] = summary.gaps
    assert (gap.start, gap.seconds) == (8, 1)
    assert "ReduceScatter" in gap.before and "AllGather" in gap.after
    assert "| communication that is exposed | 3000.0 | 27.3% |" in summary_text(summary)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_rms_norm_backward", "norms"),
        ("_swiglu_forward", "SwiGLU"),
        ("_queries_keys_backward", "queries, keys, RoPE"),
        ("_backward", "loss"),
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackward", "attention"),
        ("void at::native::vectorized_elementwise_kernel<CUDAFunctor_add>", "additions and sums"),
        ("sm90_xmma_gemm_bf16bf16", "matrix products"),
        ("Memset (Device)", "copies and fills"),
        ("mystery", "the rest"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_work_of_the_device_is_told_from_the_rest(tmp_path):
    events = [
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1e6, "dur": 5e5, "args": {"stream": 7}},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9e6, "tid": 1},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "nccl:x", "ts": 0, "dur": 9e6},
        {"ph": "i", "name": "mark", "ts": 0},
    ]
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert read_trace(path) == [("gemm", 1.0, 1.5, 7)]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="cannot be read as a trace"):
        read_trace(path)


def test_operations_of_a_processor_count_for_their_own_time(tmp_path):
    # outer 0-10 calls mm 2-5, which calls copy 3-4, and mm 6-7; another thread copies 8-12.
    times = [("outer", 1, 0, 10), ("aten::mm", 1, 2, 5), ("aten::copy_", 1, 3, 4)]
    times += [("aten::mm", 1, 6, 7), ("aten::copy_", 2, 8, 12)]
    events = [
        {"ph": "X", "cat": "cpu_op", "name": n, "tid": t, "ts": a * 1e6, "dur": (b - a) * 1e6}
        for n, t, a, b in times
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    summary = summarize(path)
    assert summary.busy == {"matrix products": 3, "copies and fills": 5, "the rest": 6}
    assert (summary.span, summary.idle) == (12, 0)


def test_a_trace_of_torchs_profiler(tmp_path):
    torch = pytest.importorskip("torch")
    x = torch.randn(500, 500)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            torch.nn.functional.softmax(x @ x, dim=-1)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    summary = summarize(path)
    # The kinds are those of aten::mm within aten::matmul, and of aten::_softmax.
    assert {"matrix products", "loss"} <= set(summary.busy)
    products = sum(
        event.self_cpu_time_total for event in profiler.key_averages() if event.key == "aten::mm"
    )
    assert summary.busy["matrix products"] == pytest.approx(products / 1e6, rel=0.1)
    assert summary.idle + sum(summary.busy.values()) == pytest.approx(summary.span)
