"""Why only the main thread may compile: the race that ended our predecessor, on plain torch, and our door against it.

An eager flex_attention call saves torch's process-wide tracing flag, clears it, and puts the saved value back. Made while
another thread traces, it puts back True after that trace has ended, and then every compiled call of the process raises.
Before torch 2.13 a compiled call, however warm, raised by itself while another thread traced.
"""

import subprocess
import sys

import pytest
import torch

SCRIPT = """
import sys, threading, time, warnings
import torch
from torch.nn.attention.flex_attention import flex_attention
from dflash_train.stage2_drafter.flex_door import flex_attention_door

warnings.simplefilter("ignore")
torch.set_num_threads(1)
warm = torch.compile(lambda x: x - 1, backend="aot_eager", dynamic=False)
warm(torch.ones(4))
tracing, ended = threading.Event(), threading.Event()
raised = []


def flag():
    return torch.fx._symbolic_trace._is_fx_tracing_flag


@torch.library.custom_op("threads::pause", mutates_args=())
def pause(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pause.register_fake
def _(x):
    if flag() and not tracing.is_set():  # the main thread is in the middle of a trace
        tracing.set()
        until = time.monotonic() + 20
        while flag() and not ended.is_set() and time.monotonic() < until:
            time.sleep(0.005)
    return torch.empty_like(x)


def other_thread():
    tracing.wait(60)
    q = torch.randn(1, 1, 16, 16)
    try:
        if sys.argv[1] == "plain":
            flex_attention(q, q, q)
        elif sys.argv[1] == "door":
            flex_attention_door(q, q, q, None)
        else:
            warm(torch.ones(4))
    except RuntimeError as error:
        raised.append(str(error))
    ended.set()


thread = threading.Thread(target=other_thread)
thread.start()
torch.compile(lambda x: pause(x) * 2, backend="aot_eager")(torch.randn(4))
thread.join()
try:
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.randn(3))
    print("later call: fine;", *raised)
except RuntimeError as error:
    print("later call:", error)
"""


def race(entry: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, entry], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="the flag is reported to be a thread's own from 2.14 on")
def test_an_eager_call_during_another_threads_trace_poisons_the_process() -> None:
    """Plain torch; when this fails on a new version, the danger is gone there and the guard below costs nothing."""
    assert "later call: Detected that you are using FX to symbolically trace" in race("plain")


def test_a_warm_call_during_another_threads_trace_raises_before_torch_2_13() -> None:
    """Which is why the compiled drafter refuses every thread but the main one, warm or not (test_compiled.py)."""
    out = race("warm")
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert ("Detected that you are using FX to symbolically trace" in out) == (version < (2, 13)), out
    assert "later call: fine" in out


def test_our_door_raises_before_it_can_touch_the_flag() -> None:
    out = race("door")
    assert "later call: fine" in out and "flex_attention was about to run dense" in out
