"""What can be told of the allocator's settings without a GPU."""

from __future__ import annotations

import pytest
import torch

from bapipe.torch.device import allocator


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch was told; it is told nothing in fact."""
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(allocator, "_in_pages", type(allocator._in_pages)())
    monkeypatch.setattr(allocator, "_try", lambda _: None)
    for name in allocator._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return told


def test_pages_once_for_a_process(switched: list[str]) -> None:
    for _ in range(2):
        allocator.keep_in_pages(torch.device("cuda"))
    assert switched == ["expandable_segments:True"]


def test_a_driver_without_pages(switched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: torch.device) -> None:
        raise RuntimeError("CUDA driver error: operation not supported")

    monkeypatch.setattr(allocator, "_try", refuse)
    allocator.keep_in_pages(torch.device("cuda"))
    assert switched == ["expandable_segments:True", "expandable_segments:False"]
    assert not allocator._in_pages.is_set()


def test_a_cpu_has_none(switched: list[str]) -> None:
    allocator.keep_in_pages(torch.device("cpu"))
    assert switched == []


def test_the_users_own_settings_stay(switched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    allocator.keep_in_pages(torch.device("cuda"))
    assert switched == []


def test_torch_takes_the_setting() -> None:
    """A private part of torch: this fails where it has moved or takes another text."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    with pytest.raises((RuntimeError, ValueError), match=r"expandable_segments|boolean|True"):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:perhaps")
