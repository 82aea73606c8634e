"""Clients of the Tinker API, each a function that prints what it has found as JSON: ``python -m ... NAME URL``."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from transformers import AutoModelForCausalLM

from tandem.samples.recorded_shards import read_logprobs, read_step
from tandem.samples.recorded_shards import steps as steps_of

VOCABULARY = 17
ADAM = {"learning_rate": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}
PROMPT = [4, 5, 6]
Rows = list[tuple[np.ndarray, dict[str, np.ndarray]]]


def begin(url: str) -> tuple[tinker.ServiceClient, tinker.TrainingClient]:
    """Begin to train the model of the server."""
    service = tinker.ServiceClient(base_url=url)
    return service, service.create_lora_training_client("base", rank=0).result()


def rows_of(rng: np.random.Generator, names: tuple[str, ...], count: int = 5) -> Rows:
    """Return sequences, and random inputs of their losses."""
    found = []
    for _ in range(count):
        token_ids = rng.integers(3, VOCABULARY, int(rng.integers(3, 20)))
        made = {
            "weights": rng.random(len(token_ids) - 1),
            "advantages": rng.standard_normal(len(token_ids) - 1),
            "logprobs": -rng.random(len(token_ids) - 1) - 2,
        }
        found.append((token_ids, {name: made[name].astype(np.float32) for name in names}))
    return found


def data_of(rows: Rows, num_zeros: int = 0) -> list[types.Datum]:
    """Return sequences as the SDK sends them, with zeros as the first targets."""
    data = []
    for token_ids, inputs in rows:
        targets = token_ids[1:].astype(np.int64)
        targets[:num_zeros] = 0
        model_input = types.ModelInput.from_ints(token_ids[:-1].tolist())
        data.append(types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": targets, **inputs}))
    return data


def logprobs_of(model: Any, token_ids: Any, num_zeros: int = 0) -> torch.Tensor:
    """Return the log-probabilities of all tokens but the first, by Transformers; of zero in the place of the first."""
    token_ids = torch.as_tensor(np.asarray(token_ids))
    logits = model(token_ids[None, :-1]).logits[0].float()
    targets = token_ids[1:].clone()
    targets[:num_zeros] = 0
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def losses_of() -> dict[str, Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]]:
    """Return the losses by their formulas, as the terms of tokens that add up to them."""

    def clipped(ratio: torch.Tensor) -> torch.Tensor:
        return ratio.clamp(0.8, 1.2)

    return {
        "cross_entropy": lambda p, i: -(p * i["weights"]),
        "importance_sampling": lambda p, i: -((p - i["logprobs"]).exp() * i["advantages"]),
        "ppo": lambda p, i: (
            -torch.minimum(
                (p - i["logprobs"]).exp() * i["advantages"], clipped((p - i["logprobs"]).exp()) * i["advantages"]
            )
        ),
        "cispo": lambda p, i: -(clipped((p - i["logprobs"]).exp()).detach() * p * i["advantages"]),
        "dro": lambda p, i: -(p * i["advantages"] - 0.5 * 0.05 * (p - i["logprobs"]) ** 2),
    }


def steps(url: str) -> Any:
    """Take ten steps, with every loss, beside plain torch; return the largest differences."""
    service, training = begin(url)
    model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=ADAM["eps"], weight_decay=ADAM["weight_decay"]
    )
    rng = np.random.default_rng(0)
    logprobs, losses, norms = [], [], []
    for step in range(10):
        parts = [list(losses_of())[step % 5], list(losses_of())[(step + 1) % 5]]
        total = torch.zeros(())
        asked = []
        for name in parts:  # two gradients add up
            rows = rows_of(rng, ("weights",) if name == "cross_entropy" else ("advantages", "logprobs"))
            num_zeros = 2 * (step % 2)
            asked.append((name, rows, training.forward_backward(data_of(rows, num_zeros), name)))
        clip = 0.5 if step % 3 == 0 else 0.0
        stepped = training.optim_step(types.AdamParams(**ADAM, grad_clip_norm=clip))
        for name, rows, future in asked:
            output = future.result()
            loss, scale = torch.zeros(()), 1.0  # terms of both signs cancel, and their rounding does not
            for (token_ids, inputs), found in zip(rows, output.loss_fn_outputs, strict=True):
                own = logprobs_of(model, token_ids, num_zeros)
                given = {key: torch.from_numpy(value) for key, value in inputs.items()}
                terms = losses_of()[name](own, given)
                loss, scale = loss + terms.sum(), scale + float(terms.abs().sum())
                logprobs.append(float((own.detach() - torch.tensor(found["logprobs"].data)).abs().max()))
            losses.append(abs(output.metrics["loss:sum"] - float(loss)) / scale)
            total = total + loss
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
        norms.append(abs(stepped.result().metrics["grad_norm"] - float(norm)) / float(norm))
        optimizer.step()
        optimizer.zero_grad()
    service.close("success")
    return {"logprobs": max(logprobs), "losses": max(losses), "norms": max(norms)}


def custom(url: str) -> Any:
    """Take steps with a loss of the client's own; a forward pass between them has no gradient."""
    service, training = begin(url)
    model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    rng, worst = np.random.default_rng(1), []

    def squared(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = torch.stack([(each**2).sum() for each in logprobs]).sum()
        return loss, {"own": float(loss)}

    for _ in range(3):
        rows = rows_of(rng, ())
        before = training.forward(data_of(rows), "cross_entropy")
        output = training.forward_backward_custom(data_of(rows), squared)
        training.optim_step(types.AdamParams(**ADAM)).result()
        loss = torch.zeros(())
        for (token_ids, _), found in zip(rows, before.result().loss_fn_outputs, strict=True):
            own = logprobs_of(model, token_ids)
            loss = loss + (own**2).sum()
            worst.append(float((own.detach() - torch.tensor(found["logprobs"].data)).abs().max()))
        worst.append(abs(output.result().metrics["own"] - float(loss)) / float(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    service.close("success")
    return max(worst)


def replayed(url: str, example: str, run: str, adam: str) -> Any:
    """Take the steps of a run by its recorded samples, made data by the example's own function.

    Return the loss and the norm of the gradient of each step, and how far the log-probabilities were from the run's.
    The last step is scored only.
    """
    spec = importlib.util.spec_from_file_location("example", example)
    assert spec is not None
    assert spec.loader is not None
    loop = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loop)
    service, training = begin(url)
    params, folder = types.AdamParams(**json.loads(adam)), Path(run) / "samples"
    *trained, last = steps_of(folder)
    found: list[dict[str, float]] = []
    gap = 0.0
    for step in (*trained, last):
        samples = read_step(folder, step)
        count = sum(int(sample.arrays.loss_mask_T.sum()) for sample in samples)
        data = []
        for sample in samples:
            tokens, size = sample.arrays.token_ids_T.tolist(), sample.scored.prompt_length
            logprobs = sample.arrays.columns["generation_logprobs_T"][size:].tolist()
            sequence = tinker.SampledSequence(
                stop_reason="stop", sequence_id="", _tokens_list=tokens[size:], _logprobs_list=logprobs
            )
            assert sample.advantage is not None
            # The run's loss is the mean over the tokens of all samples, and the SDK's is a sum.
            data.append(loop.datum(tokens[:size], sequence, sample.advantage / count))
        act = training.forward if step == last else training.forward_backward
        scored = act(data, "importance_sampling")
        if step != last:
            norm = training.optim_step(params).result().metrics["grad_norm"]
            found.append({"loss": scored.result().metrics["loss:sum"], "grad_norm": norm})
        recorded = read_logprobs(folder, step)
        for sample, output in zip(samples, scored.result().loss_fn_outputs, strict=True):
            own, size = recorded[sample.scored.group, sample.scored.sample], sample.scored.prompt_length
            assert not np.isnan(own[size:]).any()
            gap = max(gap, float(np.abs(own[size:] - np.array(output["logprobs"].data)[size - 1 :]).max()))
    service.close("success")
    return {"steps": found, "gap": gap}


def saved(url: str) -> Any:
    """Save, go on, and go on again from what was saved, with and without the optimizer."""
    service, training = begin(url)
    rng = np.random.default_rng(2)
    batches = [data_of(rows_of(rng, ("weights",))) for _ in range(4)]

    def take(client: tinker.TrainingClient, batch: list[types.Datum]) -> list[list[float]]:
        found = client.forward_backward(batch, "cross_entropy")
        client.optim_step(types.AdamParams(**ADAM)).result()
        return [each["logprobs"].data for each in found.result().loss_fn_outputs]

    for batch in batches[:2]:
        take(training, batch)
    path = training.save_state("two", ttl_seconds=3600).result().path
    went_on = [take(training, batch) for batch in batches[2:]]
    again = service.create_training_client_from_state_with_optimizer(path).result()
    with_optimizer = [take(again, batch) for batch in batches[2:]]
    without = service.create_training_client_from_state(path).result()
    without_optimizer = [take(without, batch) for batch in batches[2:]]
    rest = service.create_rest_client()
    listed = [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints]
    info = rest.get_weights_info_by_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_user_checkpoints().result().checkpoints
    errors = []
    for act in (
        lambda: training.forward(batches[0], "cross_entropy").result(),
        lambda: service.create_training_client_from_state(path).result(),
        lambda: without.save_state("../out").result(),
    ):
        errors.append(error_of(act))
    service.close("success")
    return {
        "with_optimizer": with_optimizer == went_on,
        "first_without": without_optimizer[0] == went_on[0],
        "second_without": without_optimizer[1] == went_on[1],
        "listed": listed == [path],
        "left": len(left),
        "base": info.base_model,
        "errors": errors,
    }


def recorded(url: str) -> Any:
    """Train with every loss, with a gradient that is not finite, and from states that are gone by the end."""
    service, training = begin(url)
    rng = np.random.default_rng(5)
    data = {name: data_of(rows_of(rng, ("advantages", "logprobs"))) for name in losses_of() if name != "cross_entropy"}
    data["cross_entropy"] = data_of(rows_of(rng, ("weights",)), 2)

    def take(name: Any) -> None:
        training.forward_backward(data[name], name).result()
        training.forward(data[name], name).result()
        training.optim_step(types.AdamParams(**ADAM, grad_clip_norm=0.5)).result()

    for name in data:
        take(name)
    wild = data["ppo"][0].loss_fn_inputs | {"logprobs": np.full(len(data["ppo"][0].model_input.to_ints()), -1e6, "f4")}
    datum = types.Datum(model_input=data["ppo"][0].model_input, loss_fn_inputs=wild)
    error = error_of(lambda: training.forward_backward([datum], "importance_sampling").result())
    path = training.save_state("twice").result().path
    take("ppo")
    training.load_state(path).result()
    take("dro")
    training.save_state("twice", overwrite=True).result()
    take("cispo")
    training.load_state_with_optimizer(path).result()
    take("ppo")
    training.save_weights_and_get_sampling_client().result()
    training.optim_step(types.AdamParams(**ADAM)).result()  # without a gradient
    training.save_state("last").result()
    service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    service.close("success").result()
    return {"model": training.model_id, "error": error}


def error_of(act: Callable[[], Any]) -> str:
    """Return the error of a call; empty without one."""
    try:
        act()
    except Exception as error:  # the SDK has several
        return str(error)
    return ""


def samples(url: str) -> Any:
    """Train, publish, and sample, beside Transformers."""
    service, training = begin(url)
    base = service.create_sampling_client(base_model="base").result()
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=6, seed=3, stop=[])
    models = {"base": AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)}
    found = {"base": base.sample(prompt, 3, params).result()}
    rows = rows_of(np.random.default_rng(3), ("weights",))
    training.forward_backward(data_of(rows), "cross_entropy")
    training.optim_step(types.AdamParams(**ADAM)).result()
    models["trained"] = model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    torch.stack(
        [-(logprobs_of(model, token_ids) * torch.from_numpy(inputs["weights"])).sum() for token_ids, inputs in rows]
    ).sum().backward()
    optimizer.step()
    trained = training.save_weights_and_get_sampling_client().result()
    found["trained"] = trained.sample(prompt, 3, params).result()
    again = trained.sample(prompt, 3, params).result()
    worst = 0.0
    for name, response in found.items():
        for sequence in response.sequences:
            with torch.no_grad():
                own = logprobs_of(models[name], PROMPT + sequence.tokens)[len(PROMPT) - 1 :]
            worst = max(worst, float((own - torch.tensor(sequence.logprobs)).abs().max()))
    prompt_logprobs = trained.compute_logprobs(prompt).result()
    with torch.no_grad():
        own = logprobs_of(model, PROMPT)
    worst = max(worst, float((own - torch.tensor(prompt_logprobs[1:])).abs().max()))
    # An earlier version, and the first weights, go on as they are beside a newer one that is trained further.
    training.optim_step(types.AdamParams(**ADAM)).result()
    named = training.save_weights_for_sampler("named").result().path
    from_name = service.create_sampling_client(model_path=named).result()
    scored = [client.compute_logprobs(prompt).result() for client in (base, from_name, trained)]
    kept = {
        "samples": [
            [each.tokens for each in client.sample(prompt, 3, params).result().sequences]
            == [each.tokens for each in found[name].sequences]
            for name, client in (("base", base), ("trained", trained))
        ],
        "scores": [scored[2] == prompt_logprobs, scored[1] != prompt_logprobs, scored[0] != prompt_logprobs],
    }
    named_too = training.save_weights_for_sampler("third").result().path
    oldest = error_of(lambda: from_name.sample(prompt, 1, params).result())
    oldest_by_name = error_of(lambda: service.create_sampling_client(model_path=named).result())
    from_name = service.create_sampling_client(model_path=named_too).result()
    first = found["trained"].sequences[0].tokens[0]
    stopped = from_name.sample(prompt, 1, types.SamplingParams(max_tokens=6, seed=3, stop=[first])).result()
    errors = [
        oldest,
        oldest_by_name,
        error_of(lambda: from_name.sample(prompt, 1, params, topk_prompt_logprobs=21).result()),
        error_of(lambda: from_name.sample(types.ModelInput.from_ints([4] * 40), 1, params).result()),
    ]
    service.close("success")
    return {
        "worst": worst,
        "tokens": [len(each.tokens) for each in found["trained"].sequences],
        "differ": len({tuple(each.tokens) for each in found["trained"].sequences}),
        "repeats": [each.tokens for each in again.sequences] == [each.tokens for each in found["trained"].sequences],
        "first_is_none": prompt_logprobs[0] is None,
        "stopped": [stopped.sequences[0].stop_reason, stopped.sequences[0].tokens == [first]],
        "kept": kept,
        "errors": errors,
    }


def likeliest(url: str) -> Any:
    """Ask for the likeliest tokens at each place, beside Transformers; return the largest differences."""
    service = tinker.ServiceClient(base_url=url)
    sampling = service.create_sampling_client(base_model="base").result()
    model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    prompt = np.random.default_rng(5).integers(3, VOCABULARY, 12).tolist()
    params = types.SamplingParams(max_tokens=5, temperature=0.7, seed=3, stop=[])

    def ask(**more: Any) -> types.SampleResponse:
        given = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 4, "topk_sample_logprobs": 3, **more}
        return sampling.sample(types.ModelInput.from_ints(prompt), 2, params, **given).result()

    def gap(found: Any, logits: torch.Tensor) -> float:
        """Compare those of one place; tokens must be the same."""
        logprobs, token_ids = torch.log_softmax(logits, -1).topk(len(found))
        assert [token for token, _ in found] == token_ids.tolist()
        return float((logprobs - torch.tensor([logprob for _, logprob in found])).abs().max())

    whole, part = ask(), ask(prompt_logprobs_last_n=5)
    plain = sampling.sample(types.ModelInput.from_ints(prompt), 2, params).result()
    all_of_one = ask(topk_prompt_logprobs=VOCABULARY)
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0]
        of_prompt = [gap(found, logits[place]) for place, found in enumerate(whole.topk_prompt_logprobs[1:])]
        of_all = [gap(found, logits[place]) for place, found in enumerate(all_of_one.topk_prompt_logprobs[1:])]
        of_part = [gap(found, logits[place]) for place, found in enumerate(part.topk_prompt_logprobs[7:], 6)]
        of_samples = []
        for each in whole.sequences:
            logits = model(torch.tensor([prompt + each.tokens])).logits[0, len(prompt) - 1 :] / params.temperature
            of_samples += [gap(found, logits[place]) for place, found in enumerate(each.topk_logprobs)]
    one = types.ModelInput.from_ints(prompt[:1])
    short = sampling.sample(one, 1, params, topk_prompt_logprobs=2).result().topk_prompt_logprobs
    error = error_of(lambda: ask(prompt_logprobs_last_n=12))
    service.close("success")
    return {
        "worst": max(of_prompt + of_all + of_part + of_samples),
        "places": [len(of_prompt), len(of_all), len(of_part), len(of_samples)],
        "first": whole.topk_prompt_logprobs[0],
        "left_out": part.topk_prompt_logprobs[:7] + part.prompt_logprobs[:7],
        "scores": part.prompt_logprobs[7:] == whole.prompt_logprobs[7:],
        "none": [plain.topk_prompt_logprobs, plain.sequences[0].topk_logprobs, plain.prompt_logprobs],
        "unchanged": [each.tokens for each in plain.sequences] == [each.tokens for each in whole.sequences],
        "short": short,
        "error": error,
    }


def many(url: str) -> Any:
    """Take many samples at once, and as many by a copy of the client; return how many differ, and an error."""
    service = tinker.ServiceClient(base_url=url)
    sampling = service.create_sampling_client(base_model="base").result()
    copied = pickle.loads(pickle.dumps(sampling))
    prompt = types.ModelInput.from_ints(PROMPT)
    futures = {
        (client, seed): client.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=seed, stop=[]))
        for seed in range(40)
        for client in (sampling, copied)
    }
    found = {key: future.result().sequences[0].tokens for key, future in futures.items()}
    _, training = begin(url)
    training.save_weights_for_sampler("newer").result()
    first = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=0, stop=[])).result()
    polls = all(client._futures_poller is not None for client in (sampling, copied))
    service.close("success")
    same = all(found[sampling, seed] == found[copied, seed] for seed in range(40))
    return {
        "polls": polls,
        "same": same,
        "differ": len({*map(tuple, found.values())}) > 20,
        "stays": first.sequences[0].tokens == found[sampling, 0],
    }


def once(url: str) -> Any:
    """Train, publish and sample, once each; return the log-probabilities of the sample."""
    service, training = begin(url)
    training.forward_backward(data_of(rows_of(np.random.default_rng(4), ("weights",))), "cross_entropy")
    training.optim_step(types.AdamParams(**ADAM)).result()
    sampling = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, seed=3, stop=[])
    found = sampling.sample(types.ModelInput.from_ints(PROMPT), 1, params).result().sequences[0].logprobs
    service.close("success")
    return found


def crowded(url: str) -> Any:
    """Have more tokens in progress than the 60 that a key may have: by requests out of turn, and then by the SDK."""
    service, training = begin(url)
    sampling = service.create_sampling_client(base_model="base").result()
    rows = data_of([(np.arange(20) % 10 + 3, {})])  # 20 tokens
    training.forward(rows, "cross_entropy").result()

    def gradient(seq: int) -> tuple[int, str]:
        return _gradient(url, training.model_id, seq, rows)

    def sample(seq: int, count: int) -> tuple[int, str]:
        body = {
            "sampling_session_id": sampling._sampling_session_id,
            "seq_id": seq,
            "num_samples": count,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            "sampling_params": {"max_tokens": 7},
        }
        return _post(url, "asample", "application/json", json.dumps(body).encode())

    answers = {"too large": sample(100, 7), "third": gradient(4), "fourth": gradient(5), "fifth": gradient(6)}
    answers |= {"sample": sample(101, 1), "sixth": gradient(7)}
    answers |= {"first": gradient(2), "second": gradient(3)}
    _wait_for_turn(lambda: sample(102, 5)[0] == 200)
    prompt = types.ModelInput.from_ints(PROMPT)
    futures = [sampling.sample(prompt, 1, types.SamplingParams(max_tokens=7, seed=seed)) for seed in range(12)]
    count = len([future.result() for future in futures])
    service.close("success")
    return {"answers": answers, "count": count}


def _wait_for_turn(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def survives(url: str) -> Any:
    """Train and save; go on from that when the test has killed the server and started it again."""
    service, training = begin(url)
    batch = data_of(rows_of(np.random.default_rng(5), ("weights",)))

    def take(client: tinker.TrainingClient) -> float:
        loss = client.forward_backward(batch, "cross_entropy")
        client.optim_step(types.AdamParams(**ADAM)).result()
        return loss.result().metrics["loss:sum"]

    take(training)
    path = training.save_state("kept").result().path
    losses = [take(training), take(training)]
    _meet("server")
    lost = error_of(lambda: take(training))
    service = tinker.ServiceClient(base_url=url)
    again = service.create_training_client_from_state_with_optimizer(path).result()
    went_on = [take(again), take(again)]
    sampling = again.save_weights_and_get_sampling_client().result()
    sampling.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=4)).result()
    service.close("success")
    return {"lost": lost, "same": went_on == losses}


def adapters(url: str) -> Any:
    """Train adapters, save, publish and sample; begin anew, and go on from what was saved."""
    service = tinker.ServiceClient(base_url=url)
    refused = error_of(lambda: service.create_lora_training_client("base", rank=0).result())
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5, 6]), loss_fn_inputs={"target_tokens": np.array([5, 6, 7])}
    )

    def take(client: tinker.TrainingClient, count: int) -> list[float]:
        found = []
        for _ in range(count):
            loss = client.forward_backward([datum], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            found.append(loss.result().metrics["loss:sum"])
        return found

    first = service.create_lora_training_client("base", rank=4).result()
    begun = take(first, 2)
    path = first.save_state("two").result().path
    went_on = take(first, 2)
    sampling = first.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(PROMPT)
    sequence = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=4, stop=[])).result().sequences[0]
    scored = sampling.compute_logprobs(types.ModelInput.from_ints(PROMPT + sequence.tokens)).result()[len(PROMPT) :]
    second = service.create_training_client_from_state_with_optimizer(path).result()
    info = second.get_info()
    again = take(second, 2)
    anew = take(service.create_lora_training_client("base", rank=4).result(), 2)
    service.close("success")
    return {
        "refused": refused,
        "gap": max(abs(a - b) for a, b in zip(sequence.logprobs or [], scored, strict=True)),
        "again": again == went_on,
        "anew": anew == begun,
        "learns": went_on[-1] < begun[0],
        "info": [info.is_lora, info.lora_rank],
    }


class Learner:
    """A client that trains a model of its own and samples from it, the same way each time."""

    def __init__(self, url: str, seed: int) -> None:
        self.seed = seed
        self.service = tinker.ServiceClient(base_url=url)
        self.training = self.service.create_lora_training_client("base", rank=4).result()
        self.sampling: tinker.SamplingClient | None = None
        self.trained: list[list[float]] = []
        """The numbers of trainers, and the tokens of samples."""
        self.sampled: list[list[float]] = []
        """Log-probabilities of samples."""

    def acts(self, steps: range) -> Iterator[None]:
        """Take steps of two gradients, publish after every other, and sample after each; yield between all of it."""
        prompt = types.ModelInput.from_ints(PROMPT)
        for step in steps:
            rng = np.random.default_rng([self.seed, step])
            for name in ("cross_entropy", "ppo"):
                rows = rows_of(rng, ("weights",) if name == "cross_entropy" else ("advantages", "logprobs"))
                output = self.training.forward_backward(data_of(rows), name).result()
                self.trained += [each["logprobs"].data for each in output.loss_fn_outputs]
                self.trained.append([output.metrics["loss:sum"]])
                yield
            adam = types.AdamParams(learning_rate=5e-3 * (1 + self.seed), grad_clip_norm=1.0)
            self.trained.append([(self.training.optim_step(adam).result().metrics or {})["grad_norm"]])
            yield
            if step % 2 == 0:
                self.sampling = self.training.save_weights_and_get_sampling_client().result()
                yield
            assert self.sampling is not None
            params = types.SamplingParams(max_tokens=6, seed=step, stop=[])
            for sequence in self.sampling.sample(prompt, 2, params).result().sequences:
                scores = self.sampling.compute_logprobs(types.ModelInput.from_ints(PROMPT + sequence.tokens)).result()
                self.trained += [[float(each) for each in sequence.tokens], [each or 0.0 for each in scores]]
                self.sampled.append(sequence.logprobs or [])
            yield

    def run(self, steps: range) -> None:
        """Do it all at once."""
        for _ in self.acts(steps):
            pass


def gap_between(one: list[list[float]], other: list[list[float]]) -> float:
    """Return the largest difference between the last numbers."""
    other = other[len(other) - len(one) :]
    assert [len(each) for each in one] == [len(each) for each in other]
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in zip(one, other, strict=True))


def several(url: str) -> Any:
    """Train two models alone, then in turns, at once, and from one another's saved states; return the differences."""
    alone = [Learner(url, seed) for seed in (0, 1)]
    for each in alone:
        each.run(range(7))
    third = error_of(lambda: _third(url))
    for each in alone:
        each.service.close("success").result()

    def gaps(learners: list[Learner]) -> list[list[float]]:
        return [
            [gap_between(each.trained, alone[each.seed].trained), gap_between(each.sampled, alone[each.seed].sampled)]
            for each in learners
        ]

    def at_once(learners: list[Learner], steps: range) -> list[list[float]]:
        threads = [threading.Thread(target=each.run, args=(steps,)) for each in learners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return gaps(learners)

    found: dict[str, Any] = {"third": third, "gaps": {}}
    base = tinker.ServiceClient(base_url=url)
    untrained = base.create_sampling_client(base_model="base")
    learners = [Learner(url, seed) for seed in (0, 1)]
    for _ in zip(*(each.acts(range(5)) for each in learners), strict=True):
        pass
    paths = [each.training.save_state("five").result().path for each in learners]
    for each in learners:
        each.run(range(5, 7))
    found["gaps"]["in turns"] = gaps(learners)
    for each, path in zip(learners, reversed(paths), strict=True):  # each goes on as the other has
        each.training.load_state_with_optimizer(path).result()
        each.sampling = each.training.save_weights_and_get_sampling_client().result()
        each.seed, each.trained, each.sampled = 1 - each.seed, [], []
    found["gaps"]["exchanged"] = at_once(learners, range(5, 7))
    for each in learners:
        each.service.close("success").result()
    learners = [Learner(url, seed) for seed in (1, 0)]
    found["gaps"]["at once"] = at_once(learners, range(7))
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=6, seed=0, stop=[])
    sequence = untrained.sample(prompt, 1, params).result().sequences[0]
    model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    with torch.no_grad():
        expected = logprobs_of(model, PROMPT + sequence.tokens)[len(PROMPT) - 1 :].tolist()
    found["base"] = gap_between([sequence.logprobs or []], [expected])
    found["differ"] = alone[0].sampled != alone[1].sampled
    for service in (base, *(each.service for each in learners)):
        service.close("success").result()
    return found


def crowd(url: str) -> Any:
    """Send many gradients of one model, and one of another meanwhile; return their models."""
    learners = [Learner(url, seed) for seed in (0, 1)]
    data = data_of(rows_of(np.random.default_rng(0), ("weights",)))
    many = [learners[0].training.forward_backward(data, "cross_entropy") for _ in range(30)]
    many[0].result()
    learners[1].training.forward_backward(data, "cross_entropy").result()
    for each in many:
        each.result()
    for each in learners:
        each.service.close("success").result()
    return [each.training.model_id for each in learners]


def beside(url: str) -> Any:
    """Sample from two models in turns and at once, and from one while the other publishes; return the differences.

    The test kills the engine before the last samples.
    """
    learners = [Learner(url, seed) for seed in (0, 1)]
    for each in learners:
        each.run(range(1))
    prompt = types.ModelInput.from_ints(PROMPT)

    def sample(each: Learner, seed: int, num_samples: int = 1, max_tokens: int = 20) -> Any:
        assert each.sampling is not None
        params = types.SamplingParams(max_tokens=max_tokens, seed=seed, stop=[])
        return each.sampling.sample(prompt, num_samples, params)

    def sampled(made: list[Any]) -> list[list[float]]:
        return [sequence.logprobs or [] for each in made for sequence in each.result().sequences]

    seeds = range(6)
    alone = [sampled([sample(each, seed) for seed in seeds]) for each in learners]
    made: list[list[Any]] = [[], []]
    for seed in seeds:
        for each, its in zip(learners, made, strict=True):
            its.append(sample(each, seed))
            its[-1].result()
    found: dict[str, Any] = {"in turns": [gap_between(*both) for both in zip(map(sampled, made), alone, strict=True)]}
    made = [[sample(each, seed) for seed in seeds] for each in learners]
    found["at once"] = [gap_between(*both) for both in zip(map(sampled, made), alone, strict=True)]
    _meet("counted")
    long = [sample(learners[0], seed, 40) for seed in range(8)]
    sampling = learners[1].training.save_weights_and_get_sampling_client().result()
    found["published meanwhile"] = sum(each.done() for each in long)
    sampled(long)
    found["kept"] = gap_between(sampled([sample(learners[1], seed) for seed in seeds]), alone[1])
    learners[1].sampling = sampling
    found["unchanged"] = gap_between(sampled([sample(learners[1], seed) for seed in seeds]), alone[1])
    _meet("engine")
    made = [[sample(each, seed) for seed in seeds] for each in learners]
    found["killed"] = [gap_between(*both) for both in zip(map(sampled, made), alone, strict=True)]
    for each in learners:
        each.service.close("success").result()
    return {"gaps": found, "differ": alone[0] != alone[1]}


def _third(url: str) -> None:
    """Ask for one more model, without the SDK, which would ask again for minutes."""
    session = _asked(url, "create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4}}
    _asked(url, "create_model", model)


def _asked(url: str, path: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json", "X-API-Key": os.environ["TINKER_API_KEY"]}
    request = urllib.request.Request(f"{url}/api/v1/{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code} {error.read().decode()}") from error


def two_killed(url: str) -> Any:
    """Train two models while the test kills an engine and a trainer; each goes on from its own saved state."""
    learners = [Learner(url, 0), Learner(url, 1)]
    for _ in zip(*(each.acts(range(3)) for each in learners), strict=True):
        pass
    paths = [each.training.save_state("three").result().path for each in learners]
    _meet("engine")
    before = []
    for each in learners:
        each.trained, each.sampled = [], []
        each.run(range(3, 5))
        before.append((each.trained, each.sampled))
    _meet("trainer")
    lost = [error_of(partial(each.run, range(5, 6))) for each in learners]
    for each, path in zip(learners, paths, strict=True):
        each.training = each.service.create_training_client_from_state_with_optimizer(path).result()
        each.sampling = each.training.save_weights_and_get_sampling_client().result()
        each.trained, each.sampled = [], []
    for _ in zip(*(each.acts(range(3, 5)) for each in learners), strict=True):
        pass
    for each in learners:
        each.service.close("success").result()
    gaps = [
        [gap_between(each.trained, trained), gap_between(each.sampled, sampled)]
        for each, (trained, sampled) in zip(learners, before, strict=True)
    ]
    return {"lost": lost, "gaps": gaps}


def wrong(url: str) -> Any:
    """Send training requests that are wrong, one after the other; those after them go on."""
    service, training = begin(url)
    good = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5, 6]),
        loss_fn_inputs={"target_tokens": np.array([5, 6, 7]), "weights": np.ones(3, dtype=np.float32)},
    )

    def changed(tokens: list[int] | None = None, **inputs: Any) -> types.Datum:
        model_input = good.model_input if tokens is None else types.ModelInput.from_ints(tokens)
        return types.Datum(model_input=model_input, loss_fn_inputs={**good.loss_fn_inputs, **inputs})

    def gradient(datum: types.Datum, loss: Any = "cross_entropy", **settings: float) -> Callable[[], Any]:
        return lambda: training.forward_backward([datum], loss, settings or None).result()

    acts: dict[str, Callable[[], Any]] = {
        "negative": gradient(changed(target_tokens=np.array([-1, 9, 9]))),
        "vocabulary": gradient(changed([4, 500, 6], target_tokens=np.array([500, 6, 7]))),
        "too long": gradient(changed([4] * 40, target_tokens=np.array([4] * 40))),
        "not finite": gradient(changed(weights=np.array([1, np.nan, 1], dtype=np.float32))),
        "lengths": gradient(changed(weights=np.ones(2, dtype=np.float32))),
        "loss": gradient(good, "gspo"),
        "setting": gradient(good, "ppo", entropy=1.0),
        "missing": gradient(good, "ppo"),
        "several targets": gradient(changed(target_tokens=np.full((3, 2), 5))),
        "beta": lambda: training.optim_step(types.AdamParams(beta1=1.0)).result(),
        "rate": lambda: training.optim_step(types.AdamParams(learning_rate=float("1e300"))).result(),
        "rank": lambda: service.create_lora_training_client("base", rank=8).result(),
        "base": lambda: service.create_lora_training_client("another", rank=0).result(),
    }
    errors = {name: error_of(act) for name, act in acts.items()}
    after = training.forward_backward([good], "cross_entropy").result().metrics
    service.close("success")
    return {"errors": errors, "after": after}


def absurd(url: str) -> Any:
    """Ask one model for numbers that no run computes with, and for steps without a gradient; look at both models."""
    service = tinker.ServiceClient(base_url=url)
    mine, other = (service.create_lora_training_client("base", rank=4).result() for _ in range(2))
    data = data_of(rows_of(np.random.default_rng(3), ("advantages", "logprobs")))
    adam = types.AdamParams(**ADAM)
    for model in (mine, other):
        model.forward_backward(data, "importance_sampling").result()
        model.optim_step(adam).result()

    def scores(model: Any) -> list[list[float]]:
        output = model.forward(data, "importance_sampling").result()
        return [each["logprobs"].data for each in output.loss_fn_outputs]

    before = [scores(mine), scores(other)]

    def gradient(size: int, loss: Any, **inputs: Any) -> Any:
        model_input = types.ModelInput.from_ints([4, 5, 6])
        given = {name: np.array(values, dtype=np.float32) for name, values in inputs.items()}
        targets = {"target_tokens": np.array([5, 6, 7])}
        return mine.forward_backward([types.Datum(model_input=model_input, loss_fn_inputs={**targets, **given})], loss)

    errors = {}
    # The loss: a client has mixed up the log-probabilities. It has sent the step before it can know.
    wild = gradient(3, "importance_sampling", advantages=[1.0] * 3, logprobs=[-35.0] * 3)
    late = mine.optim_step(adam)
    errors["loss"], errors["step"] = error_of(wild.result), error_of(late.result)
    # The norm: the losses of two tokens cancel, and their gradients do not.
    (scored,) = mine.forward(data_of([(np.array([4, 5, 6, 7]), {})]), "cross_entropy").result().loss_fn_outputs
    first, second, _ = scored["logprobs"].data
    most = 9e11 / max(1.0, first / second)
    gradient(3, "cross_entropy", weights=[most, -most * first / second, 0.0]).result()
    errors["norm"] = error_of(mine.optim_step(adam).result)
    unchanged = [scores(mine), scores(other)] == before
    # Steps without a gradient, each published: without moments of AdamW, they leave the weights as they are.
    mine.load_state(mine.save_state("one").result().path).result()
    still = types.AdamParams(**{**ADAM, "weight_decay": 0.0})
    for _ in range(7):
        mine.optim_step(still).result()
        sampler = mine.save_weights_and_get_sampling_client().result()
    unchanged = unchanged and [scores(mine), scores(other)] == before
    sampled = sampler.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=4)).result()
    again = mine.forward_backward(data, "importance_sampling").result().metrics["loss:sum"]
    mine.optim_step(adam).result()
    service.close("success")
    return {"errors": errors, "unchanged": unchanged, "sampled": len(sampled.sequences[0].tokens), "again": again}


def pipelined(url: str) -> Any:
    """Send many requests before the first answer, and then look at all answers."""
    service, training = begin(url)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5, 6]), loss_fn_inputs={"target_tokens": np.array([5, 6, 7])}
    )
    futures = []
    for _ in range(20):
        futures.append(training.forward_backward([datum], "cross_entropy"))
        training.optim_step(types.AdamParams(learning_rate=1e-3))
    losses = [future.result().metrics["loss:sum"] for future in futures]
    service.close("success")
    return losses


def killed(url: str) -> Any:
    """Train and sample while the test kills processes: it makes files when it has, and waits for others."""
    service, training = begin(url)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([4, 5, 6]), loss_fn_inputs={"target_tokens": np.array([5, 6, 7])}
    )

    def take(client: tinker.TrainingClient) -> float:
        loss = client.forward_backward([datum], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        return loss.result().metrics["loss:sum"]

    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=6, seed=3, stop=[])
    losses = [take(training)]
    sampling = training.save_weights_and_get_sampling_client().result()
    before = sampling.sample(prompt, 2, params).result()
    path = training.save_state("kept").result().path
    losses.append(take(training))
    _meet("engine")
    after = sampling.sample(prompt, 2, params).result()
    gap = max(
        abs(a - b)
        for one, other in zip(before.sequences, after.sequences, strict=True)
        for a, b in zip(one.logprobs or [], other.logprobs or [], strict=True)
    )
    losses.append(take(training))
    _meet("trainer")
    lost = error_of(lambda: take(training))
    stale = error_of(lambda: sampling.sample(prompt, 1, params).result())
    again = service.create_training_client_from_state_with_optimizer(path).result()
    went_on = [take(again), take(again)]
    fresh = again.save_weights_and_get_sampling_client().result()
    fresh.sample(prompt, 2, params).result()
    _meet("service")
    take(again)
    again.save_weights_and_get_sampling_client().result().sample(prompt, 2, params).result()
    service.close("success")
    return {"losses": losses, "went_on": went_on, "gap": gap, "lost": lost, "stale": stale}


def _meet(name: str) -> None:
    """Say that the time has come to kill, and wait until that is done."""
    Path(f"{name}.ready").touch()
    deadline = time.monotonic() + 120
    while not Path(f"{name}.killed").exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.02)


def another(url: str, model_id: str, path: str) -> Any:
    """Reach for what belongs to another key."""
    service = tinker.ServiceClient(base_url=url)
    rest = service.create_rest_client()
    errors = [
        error_of(lambda: service.create_lora_training_client("base", rank=0).result()),
        error_of(lambda: service.create_training_client_from_state(path).result()),
        error_of(lambda: rest.list_checkpoints(model_id).result().checkpoints[0]),
        error_of(lambda: rest.delete_checkpoint_from_tinker_path(path).result()),
    ]
    service.close("success")
    return errors


def owner(url: str) -> Any:
    """Make what another key reaches for, and stay until that has."""
    service, training = begin(url)
    path = training.save_state("mine").result().path
    Path("mine.json").write_text(json.dumps([str(training.model_id), path]))
    _meet("another")
    paths = [each.tinker_path for each in service.create_rest_client().list_user_checkpoints().result().checkpoints]
    service.close("success")
    return paths == [path]


def managed(url: str) -> Any:
    """Save a model, publish it, give it other times to live, and download it; return its paths, and what differs."""
    service, training = begin(url)
    rest = service.create_rest_client()
    rows = rows_of(np.random.default_rng(7), ("weights",))
    training.forward_backward(data_of(rows), "cross_entropy").result()
    training.optim_step(types.AdamParams(**ADAM)).result()
    before = [
        each["logprobs"].data for each in training.forward(data_of(rows), "cross_entropy").result().loss_fn_outputs
    ]
    path = training.save_state("kept", user_metadata={"a": "b"}).result().path
    external = training.save_weights_external("whole", ttl_seconds=3600).result().path

    def listed() -> list[Any]:
        found = {each.tinker_path: each for each in rest.list_user_checkpoints().result().checkpoints}
        return [[found[each].public, found[each].expires_at is not None] for each in (path, external)]

    states = [listed()]
    rest.publish_checkpoint_from_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    rest.set_checkpoint_ttl_from_tinker_path(external, None).result()
    states.append(listed())
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    rest.publish_checkpoint_from_tinker_path(external).result()
    states.append(listed())
    urls = rest.get_external_weights_urls(external).result().urls
    for name, link in urls.items():
        file = Path("downloaded", name)
        file.parent.mkdir(exist_ok=True)
        with urllib.request.urlopen(link, timeout=60) as answer:  # without a key
            file.write_bytes(answer.read())
    model = AutoModelForCausalLM.from_pretrained("downloaded", dtype=torch.float32)
    with torch.no_grad():
        after = [logprobs_of(model, token_ids).tolist() for token_ids, _ in rows]
    sampler = training.save_weights_for_sampler("held").result().path
    errors = {
        "short": error_of(lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 5).result()),
        "sampler": error_of(lambda: rest.publish_checkpoint_from_tinker_path(sampler).result()),
        "missing": error_of(lambda: rest.publish_checkpoint_from_tinker_path(f"{path}2").result()),
        "again": error_of(lambda: training.save_weights_external("whole").result()),
        "age": error_of(lambda: training.save_weights_external("age", None, ["age1x"]).result()),
        "training": error_of(lambda: training.load_state(external).result()),
    }
    info = rest.get_weights_info_by_tinker_path(external).result().base_model
    service.close("success").result()
    worst = gap_between(before, after)
    link = urls["model.safetensors"]
    return {"paths": [path, external], "states": states, "gap": worst, "errors": errors, "link": link, "info": info}


def borrows(url: str, path: str, external: str) -> Any:
    """Load and download what another key has saved; return how far that goes."""
    service = tinker.ServiceClient(base_url=url)
    rest = service.create_rest_client()

    def train() -> None:
        training = service.create_training_client_from_state_with_optimizer(path).result()
        training.optim_step(types.AdamParams(**ADAM)).result()

    acts: list[Callable[[], Any]] = [
        train,
        lambda: rest.get_weights_info_by_tinker_path(path).result(),
        lambda: rest.get_external_weights_urls(external).result(),
        lambda: rest.unpublish_checkpoint_from_tinker_path(path).result(),
        lambda: rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result(),
        lambda: rest.delete_checkpoint_from_tinker_path(path).result(),
        lambda: rest.delete_checkpoint_from_tinker_path(external).result(),
    ]
    errors = [error_of(act) for act in acts]
    listed = len(rest.list_user_checkpoints().result().checkpoints)
    service.close("success").result()
    return {"errors": errors, "listed": listed}


def withdraws(url: str, path: str, external: str) -> Any:
    """Take back what was published, and delete the download."""
    rest = tinker.RestClient(base_url=url)
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    rest.unpublish_checkpoint_from_tinker_path(external).result()
    rest.delete_checkpoint_from_tinker_path(external).result()
    return [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints]


def keyed(url: str, seed: str, name: str = "") -> Any:
    """Train, publish, sample and save by a key of one's own; return what came of it, and what the key sees.

    With `name`, another client does so at the same time: they meet twice, with all they have in between. There each has
    more tokens in progress than a key may have, by gradients that wait for an earlier one.
    """
    learner = Learner(url, int(seed))
    training, rest = learner.training, learner.service.create_rest_client()
    if name:
        _meet(f"{name}-begun")
    learner.run(range(4))
    paths = [training.save_state("same").result().path, training.save_weights_for_sampler("same").result().path]
    rows = data_of([(np.arange(20) % 10 + 3, {})] * 25)  # 500 tokens
    found = {
        "trained": learner.trained,
        "sampled": learner.sampled,
        "model": training.model_id,
        "paths": paths,
        "models": [each.training_run_id for each in rest.list_training_runs().result().training_runs],
        "listed": [each.tinker_path for each in rest.list_user_checkpoints().result().checkpoints],
    }
    if name:
        begun = [_gradient(url, training.model_id, 1000 + number, rows) for number in range(4)]
        Path(f"{name}.json").write_text(json.dumps({**found, "sampler": learner.sampling._sampling_session_id}))
        _meet(f"{name}-held")
        found["statuses"] = [*begun, _gradient(url, training.model_id, 1004, rows)]
    learner.service.close("success").result()
    return found


def _gradient(url: str, model_id: str, seq: int, data: list[types.Datum]) -> tuple[int, str]:
    """Ask for a gradient without the SDK; return status and text."""
    inputs = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    body = forward_backward_request_to_proto(types.ForwardBackwardRequest(inputs, model_id, seq)).SerializeToString()
    return _post(url, "forward_backward", "application/x-protobuf", body)


def _post(url: str, path: str, kind: str, body: bytes) -> tuple[int, str]:
    headers = {"Content-Type": kind, "X-API-Key": os.environ["TINKER_API_KEY"]}
    request = urllib.request.Request(f"{url}/api/v1/{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])), flush=True)
