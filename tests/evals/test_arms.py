import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError
from kvsieve.evals.arms import Arm, parse_arms


def test_exact_and_plain_sparse() -> None:
    assert Arm.parse("exact").sparse is None
    assert Arm.parse("sparse").sparse == SparseAttention()


def test_every_key_sets_its_field() -> None:
    text = "sparse:k=5,block=64,probe=4,selector=even,share=group,phase=decode,tail=7"
    arm = Arm.parse(text)
    assert arm.label == text
    assert arm.sparse == SparseAttention(
        k=5,
        block_size=64,
        num_probes=4,
        selector="even",
        share="group",
        phase="decode",
        dense_tail=7,
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("dense", "'dense'"),
        ("exact:k=3", "'exact:k=3'"),
        ("sparse:", "'sparse:'"),
        ("sparse:k", "'k'"),
        ("sparse:size=3", "'size=3'"),
        ("sparse:k=many", "'many'"),
        ("sparse:k=1,k=2", "once"),
        ("sparse:k=0", "got 0"),
        ("sparse:block=48", "got 48"),
        ("sparse:selector=best", "'best'"),
        ("sparse:layerk=3", "'3'"),
        ("sparse:layerk=3:4:5", "'3:4:5'"),
    ],
)
def test_a_bad_spelling_is_named(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match="expected") as caught:
        Arm.parse(text)
    assert named in str(caught.value)


def test_the_same_setting_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="different"):
        parse_arms(["exact", "exact"])


@pytest.mark.parametrize(
    "sparse",
    [
        None,
        SparseAttention(k=9),
        SparseAttention(k=32, selector="even", dense_tail=0),
        SparseAttention(exact_layers=(0, 4), layer_k=((3, 64), (7, 128))),
    ],
)
def test_a_spelled_setting_reads_back(sparse: SparseAttention | None) -> None:
    assert Arm.parse(Arm.of(sparse).label).sparse == sparse


def test_spelling_names_k_and_what_differs() -> None:
    spelled = Arm.of(SparseAttention(share="group", selector="probe")).label
    assert spelled == "sparse:k=32,selector=probe,share=group"
