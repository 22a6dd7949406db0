"""Training phases of a policy on one rank."""

from __future__ import annotations

import json
import math
import pickle
import re
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlinf.algorithms.protocol import Scores
from rlinf.errors import CheckpointError, RunFailure
from rlinf.trainers.config import FSDPTrainerConfig
from rlinf.trainers.language_trainers import save_pretrained
from rlinf.trainers.packing import _select
from rlinf.trainers.ranks import Ranks
from rlinf.trainers.trainer import global_batches
from tests.trainers.language_models import algorithm, model, naive_log_probs, random_batch, trainer
from tests.warm import Warm

ALGORITHMS = {
    "grpo": {"kl_beta": 0.1, "entropy_bonus": 0.01},
    "gspo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2},
    "cispo": {"proximal": "recomputed", "importance_sampling": "token"},
}
NO_CLIP = {"optim": {"lr": 1e-2, "max_grad_norm": None}}


def prepared(name="grpo", keys=None, **replaced):
    return algorithm(name, **(keys or {})).prepare(random_batch(**replaced))[0]


def weights_of(one):
    return {name: tensor.clone() for name, tensor in one.weights()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def assert_same_state(one, other):
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        assert_equal(one["modules"]["policy"][kind], other["modules"]["policy"][kind])
    assert one["modules"]["policy"]["steps"] == other["modules"]["policy"]["steps"]
    assert one["version"] == other["version"]


def gradient_of(name, keys, **config):
    """The summed gradient of one global batch."""
    one = trainer(name=name, keys=keys, **config)
    metrics = one.train(prepared(name, keys), 0)
    assert metrics["actor/optimizer_steps"] == 1
    return one.modules.held["policy"].gradients()[0].clone(), metrics


@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradients_do_not_depend_on_the_split(name):
    keys = ALGORITHMS[name]
    whole, metrics = gradient_of(name, keys, **NO_CLIP)
    scale = whole.abs().max()
    for split in (
        {"micro_batch_size": 1},
        {"micro_batch_size": 5},
        {"max_tokens_per_micro_batch": 20},
        {"max_tokens_per_micro_batch": 20, "packing": False},
        {"gradient_checkpointing": True, "micro_batch_size": 4},
        {"logits_per_chunk": 100},
    ):
        gradient, other = gradient_of(name, keys, **NO_CLIP, **split)
        assert ((gradient - whole).abs().max() / scale).item() < 3e-6, split
        for key in ("actor/loss", "actor/ratio", "actor/grad_norm"):
            assert other[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6)


def test_a_step_is_that_of_torch():
    """Loss, gradient, clipping and AdamW against the plain way with all logits."""
    of, batch = model(tied=True), prepared()
    one = trainer(of, optim={"lr": 1e-2, "max_grad_norm": 0.1, "weight_decay": 0.1, "eps": 1e-6})
    plain = model(tied=True)
    step = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6)
    loss_of = algorithm()
    for number in range(3):
        one.train(batch, number)
        ids, attended = batch.inputs["input_ids"], batch.inputs["attention_mask"]
        positions = (attended.cumsum(1) - 1).clamp(min=0)
        logits = plain(input_ids=ids, attention_mask=attended, position_ids=positions).logits
        scored = logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
        log_probs = scored[:, -batch.mask.shape[1] :]
        normalizer = loss_of.normalizer(batch)
        loss, _ = loss_of.loss(Scores(log_probs, None), batch, normalizer=normalizer)
        step.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        step.step()
    expected = dict(plain.named_parameters())
    for name, tensor in one.weights():
        torch.testing.assert_close(tensor, expected[name].detach(), atol=2e-5, rtol=1e-4)


def test_a_phase_passes_over_every_sequence_in_each_epoch():
    one = trainer(n_minibatches=3, update_epoch=2)
    metrics = one.train(prepared(), 0)
    assert metrics["actor/optimizer_steps"] == 6
    assert one.version == 1
    assert one.modules.held["policy"].optimizer.steps == 6


def test_order_depends_on_seed_step_and_epoch_alone():
    config = FSDPTrainerConfig(n_minibatches=3, update_epoch=2)

    def order(config, **keys):
        return [b.rewards for b in global_batches(random_batch(), config, **keys)]

    def flat(rewards):
        return torch.cat(rewards).tolist()

    base = order(config, seed=1, step=0)
    assert flat(base) == flat(order(config, seed=1, step=0))
    assert flat(base[:3]) != flat(base[3:])
    assert (
        sorted(flat(base[:3])) == sorted(flat(base[3:])) == sorted(flat([random_batch().rewards]))
    )
    for other in ({"seed": 2, "step": 0}, {"seed": 1, "step": 1}):
        assert flat(base) != flat(order(config, **other))
    still = FSDPTrainerConfig(n_minibatches=3, shuffle=False)
    assert flat(order(still, seed=1, step=0)) == random_batch().rewards.tolist()


def test_a_large_batch_is_put_in_the_same_order_part_by_part(monkeypatch):
    config = FSDPTrainerConfig(n_minibatches=5, update_epoch=2)

    def parts():
        found = list(global_batches(random_batch(), config, seed=1, step=0, rows=11))
        assert [len(part) for part in found] == [3, 3, 3, 2] * 2
        return [part.tensors() for part in found]

    whole = parts()
    monkeypatch.setattr("rlinf.trainers.trainer._COPIED_WHOLE_BYTES", 0)
    for one, other in zip(whole, parts(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_sequences_that_do_not_count_are_not_computed():
    batch = prepared()
    mask = batch.mask.clone()
    mask[:6] = 0
    one, other = trainer(), trainer()
    few = one.train(replace(batch, mask=mask), 0)
    chosen = other.train(batch.select(slice(6, None)), 0)
    assert few["actor/tokens"] == chosen["actor/tokens"]
    assert_equal(weights_of(one), weights_of(other))


def test_tokens_are_those_of_all_updates():
    batch = prepared()
    whole, divided = (trainer(n_minibatches=n).train(batch, 0) for n in (1, 2))
    assert [each["actor/optimizer_steps"] for each in (whole, divided)] == [1, 2]
    assert divided["actor/tokens"] == whole["actor/tokens"] > len(batch)


def test_nothing_to_train_on_is_no_step():
    batch = prepared()
    one = trainer()
    before = weights_of(one)
    metrics = one.train(replace(batch, mask=torch.zeros_like(batch.mask)), 0)
    assert metrics["actor/empty_updates"] == 1
    assert metrics["actor/optimizer_steps"] == 0
    assert_equal(before, weights_of(one))


def test_phases_in_a_row_without_anything_to_train_on_are_warned_of_once(caplog):
    batch, one = prepared(), trainer()
    nothing = replace(batch, mask=torch.zeros_like(batch.mask))
    for step in range(4):
        one.train(nothing, step)
    one.train(batch, 4)
    for step in range(5, 9):
        one.train(nothing, step)
    assert "nothing was trained" not in caplog.text
    for step in range(9, 12):
        one.train(nothing, step)
    assert caplog.text.count("actor: nothing was trained in 5 training phases in a row") == 1


@pytest.mark.parametrize("column", ["advantages", "log_probs"])
def test_an_update_that_is_not_finite_is_skipped(column, caplog):
    batch = prepared()
    spoilt = getattr(batch, column).clone()
    spoilt[3, 0] = torch.nan
    one = trainer(n_minibatches=3, shuffle=False)
    metrics = one.train(replace(batch, **{column: spoilt}), 0)
    assert metrics["actor/skipped_updates"] == 1
    assert metrics["actor/optimizer_steps"] == 2
    assert math.isfinite(metrics["actor/loss"])  # of the updates that were applied
    assert math.isfinite(metrics["actor/grad_norm"])
    assert all(tensor.isfinite().all() for tensor in weights_of(one).values())
    one.train(replace(batch, **{column: spoilt}), 1)
    assert caplog.text.count("actor: an update of training phase 0 was skipped") == 1
    assert caplog.text.count("skipped") == 2  # once, with the metric


def test_too_many_skipped_updates_end_the_run_with_the_batch_kept(tmp_path):
    batch = prepared()
    one = FSDPTrainerConfig(max_skipped_updates=1, n_minibatches=3, shuffle=False).build(
        model(), algorithm(), ranks=Ranks(), total_steps=1, seed=0, failure_directory=tmp_path
    )
    assert batch.advantages is not None
    broken = replace(batch, advantages=batch.advantages * torch.nan)
    with pytest.raises(RunFailure, match=r"2 updates of training phase 7 .*so were advantages"):
        one.train(broken, 7)
    kept = load_file(tmp_path / "actor_batch_of_step_7.safetensors")
    assert torch.equal(kept["inputs.input_ids"], batch.inputs["input_ids"][4:8])
    assert bool(kept["advantages"].isnan().all())
    about = json.loads((tmp_path / "actor_batch_of_step_7.json").read_text())
    assert about["step"] == 7
    assert about["metrics"]["actor/loss"] == "nan"


def test_a_refused_update_is_not_applied():
    one = trainer(keys={"early_stop_imp_ratio": 5.0})
    before = weights_of(one)
    batch = prepared()
    far = replace(batch, log_probs=batch.log_probs - 3.0)
    metrics = one.train(far, 0)
    assert metrics["actor/refused_updates"] == 1
    assert_equal(before, weights_of(one))


def test_refused_updates_are_warned_of_at_the_first_and_where_no_phase_applies_one(caplog):
    one = trainer(keys={"early_stop_imp_ratio": 5.0})
    batch = prepared()
    far = replace(batch, log_probs=batch.log_probs - 3.0)
    for step in range(4):
        one.train(far, step)
    first = "actor: an update of training phase 0 was refused by the algorithm"
    assert caplog.text.count(first) == caplog.text.count("was refused") == 1
    assert re.search(r"mean ratio of \d{2}\.\d+; see algorithm.early_stop_imp_ratio", caplog.text)
    assert "nothing was trained" not in caplog.text
    one.train(replace(batch, mask=torch.zeros_like(batch.mask)), 4)
    warned = caplog.text.partition("actor: nothing was trained in 5 training phases in a row")[2]
    assert "no row of a batch counts" in warned
    assert "the algorithm refused updates; see algorithm.early_stop_imp_ratio" in warned


def test_engine_and_trainer_must_agree_before_the_first_update():
    one = trainer(n_minibatches=2)
    batch = random_batch()
    same = replace(batch, log_probs=one.log_probs(batch), version=0)
    metrics = one.train(algorithm().prepare(same)[0], 0)
    assert metrics["actor/optimizer_steps"] == 2

    other = trainer()
    before = weights_of(other)
    shifted = replace(same, log_probs=same.log_probs - 0.2)
    with pytest.raises(RunFailure, match=r"rollout and trainer .*ratios are 2\.2\de-01 away"):
        other.train(algorithm().prepare(shifted)[0], 0)
    assert_equal(before, weights_of(other))


def test_stale_tokens_are_not_compared():
    one = trainer()
    batch = random_batch()
    stale = replace(batch, version=0, versions=batch.versions - 1)
    assert one.train(algorithm().prepare(stale)[0], 0)["actor/optimizer_steps"] == 1


def test_log_probs_are_those_of_the_present_weights():
    batch = random_batch()
    one = trainer(name="grpo", keys={"kl_beta": 0.1})
    first = one.log_probs(batch)
    torch.testing.assert_close(first, naive_log_probs(model(), batch), atol=1e-5, rtol=0)
    assert torch.equal(one.reference_log_probs(batch), first)
    one.train(prepared(), 0)
    assert (one.log_probs(batch) - first).abs().max() > 1e-3
    assert torch.equal(one.reference_log_probs(batch), first)
    with pytest.raises(RuntimeError, match="asked for no reference"):
        trainer().reference_log_probs(batch)


def test_bfloat16_follows_float32():
    batch = prepared()
    rate = {"optim": {"lr": 1e-3}}
    single = trainer(**rate)
    half = trainer(precision={"param": "bfloat16"}, micro_batch_size=5, **rate)
    start = single.log_probs(batch)
    assert {tensor.dtype for tensor in weights_of(half).values()} == {torch.bfloat16}
    for step in range(3):
        single.train(batch, step)
        half.train(batch, step)
    difference = (single.log_probs(batch) - half.log_probs(batch)).abs()
    moved = (single.log_probs(batch) - start).abs()
    assert difference.mean() < 0.1 * moved.mean()
    master = half.state_dict()["modules"]["policy"]["master"]
    assert {tensor.dtype for tensor in master.values()} == {torch.float32}


def test_small_steps_are_not_lost_to_bfloat16():
    batch = prepared()
    one = trainer(precision={"param": "bfloat16"}, optim={"lr": 1e-5, "max_grad_norm": None})
    before = {n: t.clone() for n, t in one.state_dict()["modules"]["policy"]["master"].items()}
    one.train(batch, 0)
    after = one.state_dict()["modules"]["policy"]["master"]
    changed = sum((after[name] != tensor).sum().item() for name, tensor in before.items())
    assert changed > 0.9 * sum(tensor.numel() for tensor in before.values())


@pytest.mark.parametrize("tied", [True, False])
def test_state_continues_bit_for_bit(tied):
    batch = prepared()
    one = trainer(model(tied=tied), keys={"kl_beta": 0.1}, n_minibatches=2)
    one.train(batch, 0)
    state = torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, one.state_dict()
    )
    other = trainer(model(tied=tied, seed=9), keys={"kl_beta": 0.1}, n_minibatches=2)
    other.load_state_dict(state)
    assert one.train(batch, 1) == other.train(batch, 1)
    assert_same_state(one.state_dict(), other.state_dict())
    assert torch.equal(one.reference_log_probs(batch), other.reference_log_probs(batch))
    assert other.version == 2


def test_state_of_another_model_is_refused():
    with pytest.raises(CheckpointError, match="of another shape"):
        trainer().load_state_dict(trainer(model(hidden_size=16)).state_dict())


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
def test_offloaded_memory_comes_back_bit_for_bit(param):
    batch = prepared()
    everything = {"weights": True, "gradients": True, "optimizer": True}
    precision = {"param": param}
    one, other = trainer(offload=everything, precision=precision), trainer(precision=precision)
    for step in range(2):
        one.train(batch, step)
        other.train(batch, step)
        one.offload()
        storages = {
            p.untyped_storage().nbytes() for p in one.modules.modules["policy"].model.parameters()
        }
        assert storages == {0}
        with pytest.raises(RuntimeError, match="call onload first"):
            one.log_probs(batch)
        assert_same_state(one.state_dict(), other.state_dict())
        one.onload()
    assert torch.equal(one.log_probs(batch), other.log_probs(batch))


@pytest.mark.parametrize("tied", [True, False])
def test_saved_model_is_loaded_by_transformers(tied, tmp_path):
    batch = prepared()
    one = trainer(model(tied=tied))
    one.train(batch, 0)
    save_pretrained(one, tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    expected = naive_log_probs(loaded, batch)
    torch.testing.assert_close(one.log_probs(batch), expected, atol=1e-5, rtol=0)
    assert type(loaded).__name__ == "Qwen2ForCausalLM"


def test_weights_of_a_large_model_are_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr("rlinf.trainers.export._FILE_BYTES", 10_000)
    one = trainer(model(tied=False))
    save_pretrained(one, tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_equal(weights_of(one), {n: p.detach() for n, p in loaded.named_parameters()})


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_are_saved_as_their_files_have_them(family, tmp_path):
    of = model(family, tied=False)
    of.save_pretrained(tmp_path / "by transformers")
    expected = load_file(tmp_path / "by transformers" / "model.safetensors")
    assert any("mlp.experts.3.up_proj" in name for name in expected)
    save_pretrained(trainer(of), tmp_path / "ours")
    assert_equal(load_file(tmp_path / "ours" / "model.safetensors"), expected)


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_buffers_of_the_files_are_among_the_weights(lora):
    of = model("deepseek_v3", tied=False)
    expected = of.model.layers[1].mlp.gate.e_score_correction_bias.clone()
    one = trainer(of, **({} if lora is None else {"lora": lora}))
    one.train(prepared(), 0)
    found = dict(one.weights())
    assert torch.equal(found["model.layers.1.mlp.gate.e_score_correction_bias"], expected)
    assert found.keys() == model("deepseek_v3", tied=False).state_dict().keys()


def test_weights_share_memory_and_names_with_the_model():
    of = model(tied=True)
    expected = {name: p.detach().clone() for name, p in of.named_parameters()}
    one = trainer(of)
    found = dict(one.weights())
    assert_equal(found, expected)
    assert "lm_head.weight" not in found
    address = found["model.norm.weight"].data_ptr()
    assert address == of.model.norm.weight.data_ptr()
    one.train(prepared(), 0)
    assert of.model.norm.weight.data_ptr() == address


def test_critic_warm_up_leaves_the_policy_alone():
    keys = {"critic_warmup_steps": 1}
    one = trainer(name="ppo", keys=keys)
    before = weights_of(one)
    batch = prepared("ppo", keys)
    one.train(batch, 0)
    assert_equal(before, weights_of(one))
    assert one.train(batch, 1)["actor/optimizer_steps"] == 1


def test_sharded_state_on_one_rank(tmp_path):
    batch = prepared()
    one = trainer(keys={"kl_beta": 0.1})
    one.train(batch, 0)
    assert set(one.save_sharded(tmp_path / "here")) == set((tmp_path / "here").iterdir())
    other = trainer(model(seed=4), keys={"kl_beta": 0.1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch would say that there are no ranks
        other.load_sharded(tmp_path / "here")
    assert_same_state(one.state_dict(), other.state_dict())
    assert torch.equal(one.reference_log_probs(batch), other.reference_log_probs(batch))
    assert one.train(batch, 1) == other.train(batch, 1)
    with pytest.raises(CheckpointError, match="holds no sharded checkpoint"):
        other.load_sharded(tmp_path / "there")
    with pytest.raises(CheckpointError, match="is of another model"):
        trainer(model(hidden_size=16), keys={"kl_beta": 0.1}).load_sharded(tmp_path / "here")


class Harmful:
    """Leaves a trace where it is built from a pickle."""

    trace = "harm"

    def __reduce__(self):
        return open, (self.trace, "w")


@pytest.mark.parametrize("place", ["index", "value"])
def test_reading_a_sharded_state_runs_no_code_of_it(tmp_path, monkeypatch, place):
    one = trainer()
    harmful = Harmful()
    harmful.trace = str(tmp_path / "harm")
    if place == "value":
        monkeypatch.setattr(one, "numbers", lambda: {"version": harmful})
    one.save_sharded(tmp_path / "here")
    monkeypatch.undo()
    if place == "index":
        index = tmp_path / "here" / ".metadata"
        metadata = pickle.loads(index.read_bytes())
        metadata.planner_data["version"] = harmful
        index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError):
        trainer().load_sharded(tmp_path / "here")
    assert not (tmp_path / "harm").exists()


def test_a_sharded_state_that_does_not_fit_on_the_disk_says_so(tmp_path):
    """By a limit of the size of files, in a process of its own, which would keep it."""
    program = f"""
import errno, resource
from pathlib import Path
from tests.trainers.language_models import trainer
one = trainer()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    one.save_sharded(Path({str(tmp_path)!r}))
except OSError as error:
    assert error.errno == errno.EFBIG, error
else:
    raise SystemExit("there was room")
"""
    one = Warm(["-c", program])
    _, errors = one.communicate(timeout=120)
    assert one.returncode == 0, errors.decode()


def test_an_update_that_would_be_refused_is_not_counted_as_skipped():
    one = trainer(keys={"early_stop_imp_ratio": 5.0})
    batch = prepared()
    assert batch.advantages is not None
    far = replace(
        batch,
        log_probs=batch.log_probs - 3.0,
        advantages=batch.advantages * torch.nan,
    )
    metrics = one.train(far, 0)
    assert metrics["actor/refused_updates"] == 1
    assert metrics["actor/skipped_updates"] == 0


def test_the_filler_of_an_empty_micro_batch_counts_nowhere():
    batch = prepared()
    filler = _select(batch, [])
    assert len(filler) == 1
    assert not filler.mask.any()
    assert bool(batch.mask[0].any())


def test_every_epoch_and_step_has_its_own_order_of_sequences():
    batch = prepared()
    count = len(batch)
    batch = replace(batch, groups=torch.arange(count))
    config = FSDPTrainerConfig(update_epoch=3, n_minibatches=count, shuffle=True)
    epochs = []
    for step in (0, 1):
        parts = global_batches(batch, config, seed=1, step=step)
        order = [int(part.groups) for part in parts]
        epochs += [tuple(order[i : i + count]) for i in range(0, 3 * count, count)]
    assert len(epochs) == 6
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len(set(epochs)) == len(epochs)


def test_the_reference_of_a_run_that_begins_with_an_adapter_has_that_adapter(tmp_path):
    settings = {"rank": 4, "alpha": 8.0}
    one = trainer(keys={"kl_beta": 0.1}, lora=settings)
    for step in range(2):
        one.train(prepared(), step)
    save_pretrained(one, tmp_path)
    begun = settings | {"path": str(tmp_path / "adapter")}
    other = trainer(keys={"kl_beta": 0.1}, lora=begun)
    batch = prepared()
    assert torch.equal(other.reference_log_probs(batch), other.log_probs(batch))
    assert not torch.equal(one.reference_log_probs(batch), one.log_probs(batch))
