"""MNIST's files are read unchanged, errors in the files are named, and the CNN learns digits from them."""

import contextlib
import gzip
import importlib.util
import io
import json
import os
import struct
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import yaml
from sklearn.datasets import load_digits

from ddpjob_operator.job import validation

EXAMPLE = Path(__file__).parents[2] / "trainer/examples/mnist.py"
spec = importlib.util.spec_from_file_location("mnist", EXAMPLE)
assert spec.loader is not None
mnist = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mnist)

EPOCHS = 5  # enough, because the CNN reads 97 of 100 digits after four epochs
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(values: torch.Tensor) -> bytes:
    return struct.pack(f">I{values.ndim}I", 0x0800 | values.ndim, *values.shape) + values.numpy().tobytes()


def write(folder: Path, images: torch.Tensor, labels: torch.Tensor, train: int, *, zipped: bool = False) -> Path:
    """Write the first `train` samples as the training set, the others as the test set."""
    parts = {"train": slice(None, train), "t10k": slice(train, None)}
    for name, part in parts.items():
        for file, values in ((f"{name}-images-idx3-ubyte", images[part]), (f"{name}-labels-idx1-ubyte", labels[part])):
            if zipped:
                (folder / f"{file}.gz").write_bytes(gzip.compress(idx(values)))
            else:
                (folder / file).write_bytes(idx(values))
    return folder


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return four images to train on, two to test with."""
    images = torch.arange(6 * 28 * 28).remainder(256).to(torch.uint8).view(6, 28, 28)
    return write(tmp_path, images, torch.arange(6, dtype=torch.uint8), 4)


def test_plain_and_gzip_files_give_the_same_bytes(small: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    images, labels, test_images, test_labels = mnist.load_data(str(small))
    assert (images.shape, test_images.shape) == ((4, 28, 28), (2, 28, 28))
    assert (labels.tolist(), test_labels.tolist()) == ([0, 1, 2, 3], [4, 5])
    assert images.flatten()[:300].tolist() == [i % 256 for i in range(300)]
    zipped = tmp_path_factory.mktemp("zipped")
    everything = torch.cat([images, test_images]), torch.cat([labels, test_labels]).to(torch.uint8)
    again = mnist.load_data(str(write(zipped, *everything, 4, zipped=True)))
    assert all(torch.equal(a, b) for a, b in zip(again, (images, labels, test_images, test_labels), strict=True))


def test_a_gzip_file_is_recognized_by_its_content_and_not_by_its_suffix(small: Path) -> None:
    before = mnist.load_data(str(small))
    file = small / TRAIN_IMAGES
    file.write_bytes(gzip.compress(file.read_bytes()))
    (small / TRAIN_LABELS).rename(small / f"{TRAIN_LABELS}.gz")
    assert all(torch.equal(a, b) for a, b in zip(before, mnist.load_data(str(small)), strict=True))


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        (TRAIN_IMAGES, lambda b: b[:-1], "cut short: its header announces 4 × 28 × 28 = 3,136 bytes, and 3,135 follow"),
        (TRAIN_IMAGES, lambda b: b + b"x", "too long: its header announces"),
        (TRAIN_IMAGES, lambda b: b[:10], "has 10 bytes, the header alone needs 16"),
        (TRAIN_IMAGES, lambda b: b"", "begins with b''"),
        (TRAIN_IMAGES, lambda b: b"<!DOCTYPE html>" + b, "perhaps the web page of a failed download"),
        (TRAIN_IMAGES, lambda b: b"\0\0\x08\x01" + b[4:], "and an IDX file of images with b'\\x00\\x00\\x08\\x03'"),
        (TRAIN_IMAGES, lambda b: gzip.compress(b)[:-40], "the gzip data is damaged or cut short"),
        (TRAIN_IMAGES, lambda b: b"\x1f\x8b" + bytes(range(200)), "the gzip data is damaged or cut short"),
        (TRAIN_IMAGES, lambda b: gzip.compress(b)[:-8] + bytes(8), "the gzip data is damaged or cut short"),
        (TRAIN_IMAGES, lambda b: idx(torch.zeros(4, 8, 8, dtype=torch.uint8)), "images of 8 × 8 pixels, must be 28"),
        (TRAIN_LABELS, lambda b: idx(torch.zeros(3, dtype=torch.uint8)), "3 labels for 4 images. Take both from one"),
        (TRAIN_LABELS, lambda b: idx(torch.full((4,), 10, dtype=torch.uint8)), "has a label 10, and there are ten"),
        (TRAIN_LABELS, lambda b: bytes(28_881), "as long as MNIST's file, but its MD5 is "),
    ],
)
def test_a_damaged_file_is_named_with_the_error(small, name, damage, sentence):
    file = small / name
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(mnist.DataError) as caught:
        mnist.load_data(str(small))
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(str(file))


def test_a_missing_file_is_named_and_nothing_is_downloaded(small: Path) -> None:
    (small / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(mnist.DataError, match=r"no t10k-labels-idx1-ubyte and no t10k-labels-idx1-ubyte\.gz"):
        mnist.load_data(str(small))


@pytest.mark.parametrize("words", [("--snapshot-every", "0"), ("--epochs", "-1"), ("--global-batch", "0")])
def test_a_count_below_one_is_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        mnist.options(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {words[0]}: {words[1]} is less than 1\n")


def test_an_empty_set_is_named(small: Path) -> None:
    (small / TRAIN_IMAGES).write_bytes(idx(torch.zeros(0, 28, 28, dtype=torch.uint8)))
    (small / TRAIN_LABELS).write_bytes(idx(torch.zeros(0, dtype=torch.uint8)))
    with pytest.raises(mnist.DataError, match="has no label"):
        mnist.load_data(str(small))


def test_the_example_job_mounts_the_named_folder():
    job, problems = validation.parse(yaml.safe_load((EXAMPLE.parents[2] / "examples/mnist.yaml").read_text()))
    assert problems == []
    trainer = job.spec.template["spec"]["containers"][0]
    launcher, script, *options = trainer["command"]
    assert (launcher, EXAMPLE.parents[2] / script) == ("torchrun", EXAMPLE)
    assert mnist.options(options).data == trainer["volumeMounts"][0]["mountPath"]


def test_the_cnn_recognizes_97_of_100_unseen_digits_of_scikit_learn(run_ranks, tmp_path, free_port):
    digits = load_digits()
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
    large = F.interpolate(torch.tensor(digits.images).unsqueeze(1), size=(28, 28), mode="bilinear")
    images = (large.squeeze(1) * 255 / 16).round().to(torch.uint8)[order]
    write(tmp_path, images, torch.tensor(digits.target, dtype=torch.uint8)[order], 1440, zipped=True)

    def rank_main(rank: int) -> str:
        place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}
        os.environ.update({name: str(value) for name, value in place.items()}, CUDA_VISIBLE_DEVICES="")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            mnist.main(["--data", str(tmp_path), "--epochs", str(EPOCHS)])
        return out.getvalue()

    of_rank_0, of_rank_1 = run_ranks(rank_main, 2)
    done = json.loads(of_rank_0.splitlines()[-1])
    assert (done["steps"], done["world_size"]) == (EPOCHS * (1440 // 64), 2)
    assert done["accuracy"] >= 0.97
    assert of_rank_1 == ""
