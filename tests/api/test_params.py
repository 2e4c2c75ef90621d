"""From fields to what the engine is asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from graphrt.api.defaults import SamplingDefaults, load_sampling_defaults
from graphrt.api.errors import ApiError
from graphrt.api.params import (
    chat_logprobs,
    choice_seed,
    choices,
    logit_bias,
    min_tokens,
    output_budget,
    prompt_logprobs,
    sampling_of,
    stop_ids,
    stop_strings,
)
from graphrt.api.request_schema import ChatRequest, Message
from graphrt.api.unbuilt import refuse_unbuilt
from graphrt.errors import ModelError
from graphrt.seam.records import Sampling

PLAIN = SamplingDefaults()


def request(**fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[Message("user", "hi")], **fields)


def test_given_values_win_over_the_models_defaults() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.1)
    assert sampling_of(request(seed=5), defaults) == Sampling(0.6, 40, 0.9, 0.1, 5)
    given = request(seed=5, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    assert sampling_of(given, defaults) == Sampling(0.0, 0, 1.0, 0.0, 5)
    assert sampling_of(request(seed=5), PLAIN) == Sampling(1.0, 0, 1.0, 0.0, 5)


def test_edges_of_the_ranges() -> None:
    assert sampling_of(request(temperature=1e-9), PLAIN).temperature == 0.0
    assert sampling_of(request(top_k=-1), PLAIN).top_k == 0
    none = sampling_of(request(top_p=0.0, top_k=50), PLAIN)
    assert (none.top_p, none.top_k) == (1.0, 1)
    with pytest.raises(ApiError, match="top_k"):
        sampling_of(request(top_k=2**31), PLAIN)


def test_seeds_are_64_bits_and_drawn_when_absent() -> None:
    assert sampling_of(request(seed=-1), PLAIN).seed == 2**64 - 1
    assert sampling_of(request(seed=2**63), PLAIN).seed == 2**63
    drawn = {sampling_of(request(), PLAIN).seed for _ in range(20)}
    assert len(drawn) == 20 and all(0 <= seed < 2**64 for seed in drawn)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ApiError) as caught:
            sampling_of(request(seed=seed), PLAIN)
        assert caught.value.param == "seed"


def test_stop_strings() -> None:
    assert stop_strings(request()) == ()
    assert stop_strings(request(stop="\n")) == ("\n",)
    assert stop_strings(request(stop=["a", "b", "a"])) == ("a", "b")
    assert stop_strings(request(stop=[])) == ()
    for bad in ("", ["a", ""], "x" * 1025):
        with pytest.raises(ApiError) as caught:
            stop_strings(request(stop=bad))
        assert caught.value.param == "stop"


def test_stop_ids_come_before_the_models_own() -> None:
    assert stop_ids(request(), {7, 2}, 100) == [2, 7]
    assert stop_ids(request(stop_token_ids=[9, 2]), [2, 7], 100) == [9, 2, 7]
    assert stop_ids(request(ignore_eos=True, stop_token_ids=[9]), [2, 7], 100) == [9]
    for bad in ([100], [-1]):
        with pytest.raises(ApiError) as caught:
            stop_ids(request(stop_token_ids=bad), [2, 7], 100)
        assert caught.value.param == "stop_token_ids"


def test_penalties() -> None:
    given = sampling_of(request(seed=1, presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.3), PLAIN)
    assert (given.presence_penalty, given.frequency_penalty, given.repetition_penalty) == (-2.0, 2.0, 1.3)
    defaults = SamplingDefaults(repetition_penalty=1.1)
    assert sampling_of(request(), defaults).repetition_penalty == 1.1
    assert sampling_of(request(repetition_penalty=1.0), defaults).repetition_penalty == 1.0


def test_seeds_of_several_replies() -> None:
    seeds = [choice_seed(5, i) for i in range(128)]
    assert seeds[0] == 5 and len(set(seeds)) == 128 and all(0 <= seed < 2**64 for seed in seeds)
    assert seeds[1] == choice_seed(5, 1) != choice_seed(6, 1)
    assert choice_seed(2**64 - 1, 1) != choice_seed(0, 1)


def test_logit_bias() -> None:
    assert logit_bias(request(), 100) == []
    given = {"7": -100.0, "0": 100.0, "99": -99.5}
    assert logit_bias(request(logit_bias=given), 100) == [(7, -math.inf), (0, 100.0), (99, -99.5)]
    for bad in (
        {"100": 1.0},
        {"-1": 1.0},
        {"x": 1.0},
        {"": 1.0},
        {"1.0": 1.0},
        {"9" * 5000: 1.0},
        {"٣": 1.0},
        {"5": 100.5},
        {"5": -101.0},
    ):
        with pytest.raises(ApiError) as caught:
            logit_bias(request(logit_bias=bad), 100)
        assert caught.value.param == "logit_bias" and len(str(caught.value)) < 150


def test_logprobs_and_their_number() -> None:
    assert [chat_logprobs(*given) for given in ((None, None), (False, 0), (True, None), (True, 20))] == [-1, -1, 0, 20]
    for given in ((None, 1), (False, 3)):
        with pytest.raises(ApiError, match="logprobs true") as caught:
            chat_logprobs(*given)
        assert caught.value.param == "top_logprobs"
    assert prompt_logprobs(request(prompt_logprobs=0)) == 0
    with pytest.raises(ApiError) as caught:
        prompt_logprobs(request(prompt_logprobs=0, stream=True))
    assert caught.value.param == "prompt_logprobs"


def test_the_least_length_is_within_the_most() -> None:
    assert [min_tokens(request(min_tokens=given), 5) for given in (None, 0, 5)] == [0, 0, 5]
    with pytest.raises(ApiError, match=r"6.*at most 5"):
        min_tokens(request(min_tokens=6), 5)


def test_no_more_replies_than_the_queue_takes() -> None:
    assert choices(request(), 20, 20) == 1 and choices(request(n=5), 4, 20) == 5
    for n, prompts in ((21, 1), (7, 3), (1, 21)):
        with pytest.raises(ApiError, match="at most 20"):
            choices(request(n=n), prompts, 20)


def test_the_reply_gets_the_room_that_the_prompt_leaves() -> None:
    assert output_budget(None, "max_tokens", "messages", 30, 100) == 70
    assert output_budget(70, "max_tokens", "messages", 30, 100) == 70
    with pytest.raises(ApiError, match=r"100 tokens.*take 30.*asks for 71, at most 70") as caught:
        output_budget(71, "max_tokens", "messages", 30, 100)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(ApiError, match=r"100 tokens.*take 100") as caught:
        output_budget(None, "max_tokens", "messages", 100, 100)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


@pytest.mark.parametrize(
    ("field", "bad", "good"),
    [
        ("tools", [{"type": "function"}], []),
        ("tool_choice", "required", "none"),
        ("tool_choice", {"type": "function"}, "auto"),
        ("functions", [{}], []),
        ("function_call", {"name": "f"}, "none"),
        ("response_format", {"type": "json_object"}, {"type": "text"}),
        ("response_format", {}, None),
        ("modalities", ["text", "audio"], ["text"]),
    ],
)
def test_a_field_not_built_is_refused_by_name(field: str, bad: Any, good: Any) -> None:
    refuse_unbuilt(request(**{field: good}))
    with pytest.raises(ApiError) as caught:
        refuse_unbuilt(request(**{field: bad}))
    assert caught.value.param == field and field in str(caught.value)
    assert len(str(caught.value)) < 250


def test_defaults_come_from_generation_config(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path) == PLAIN
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1, 2]}))
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(0.6, 0.95, 20, 0.0)
    path.write_text(json.dumps({"temperature": None, "top_k": -1, "repetition_penalty": 1.1}))
    assert load_sampling_defaults(tmp_path) == SamplingDefaults(repetition_penalty=1.1)
    path.write_text(json.dumps({"top_p": 3}))
    with pytest.raises(ModelError, match="top_p is 3"):
        load_sampling_defaults(tmp_path)
