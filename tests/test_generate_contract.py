"""generate()'s own contract: every option gives the text of single-row `model.generate`, or is refused by name."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from headsmith.heads import Target
from headsmith.inference import FixedTree, SpeculativeDecoder, chain
from headsmith.inference.options import HONOURED, INDIFFERENT, WARPED, not_honoured
from headsmith.inference.sampling import PREFIX_FREE
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TextStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput, MaxLengthCriteria, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from tests.scripted import ScriptedDrafter
from tests.tiny import random_prompts, tiny_target
from tests.tokenizers_for_tests import build_tokenizer
from tests.wrong_paths import WRONG_PATHS

NEW, EOS, VOCAB = 17, 7, 97
BUSH = FixedTree(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 0, 0, 0)))
DRAFTERS = {
    "perfect": {"rank": lambda row, level: (row + level) % 2},  # its siblings are wrong
    "right_for_2_levels": {"right": lambda row, level: level <= 2},
    "wrong": {"right": lambda row, level: False},
}


class EvenBonus(LogitsProcessor):
    """Favours tokens that make the sum of the text even. Expects one row, and writes in place."""

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == 1 == scores.shape[0]
        scores[:, int(input_ids.sum()) % 2 :: 2] += 3.0
        return scores


class StopAtLength(StoppingCriteria):
    """Ends a text whose sum is divisible by 5 once it has 14 tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= 14 and int(input_ids.sum()) % 5 == 0])


def allowed(_row, text):
    """Tokens near the last one; a text that breaks this rule is one that nobody should be shown."""
    last, before = int(text[-1]), int(text[-2])
    if len(text) > 12:
        assert (last - before) % VOCAB <= 40, "shown a text that the constraint forbids"
    return [(last + step) % VOCAB for step in range(41)]


# Each changes the greedy text of the target below; asserted.
OPTIONS = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": "words",
    "sequence_bias": "bias",
    "min_new_tokens": {"eos_token_id": "early", "min_new_tokens": 9},
    "min_length": {"eos_token_id": "early", "min_length": 16},
    "suppress_tokens": {"suppress_tokens": "said"},
    "begin_suppress_tokens": {"begin_suppress_tokens": "said"},
    "forced_eos_token_id": {"forced_eos_token_id": EOS, "eos_token_id": EOS},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.9), "eos_token_id": EOS},
    "eos_list": {"eos_token_id": "early"},
    "max_length": {"max_length": 16, "max_new_tokens": None},
    "stop_strings": {"stop_strings": "early"},
    "stopping_criteria": {"stopping_criteria": [StopAtLength()]},
    "given_max_length": {"stopping_criteria": [MaxLengthCriteria(15)]},
    "logits_processor": {"logits_processor": [EvenBonus()]},
    "given_penalty": {"logits_processor": [RepetitionPenaltyLogitsProcessor(2.5)], "repetition_penalty": 1.1},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allowed},
    "several": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "eos_token_id": "early", "min_new_tokens": 6},
}  # fmt: skip
# They change no greedy text, or only with sampling.
HARMLESS = {
    "renormalize_logits": {"renormalize_logits": True},
    "remove_invalid_values": {"remove_invalid_values": True},
    "forced_bos_token_id": {"forced_bos_token_id": 5},
    "max_time": {"max_time": 600.0},
    "use_cache": {"use_cache": False},
    "warpers": {"temperature": 0.5, "top_k": 3, "top_p": 0.5},
}


@pytest.fixture(scope="module")
def target():
    return Target(tiny_target().model, build_tokenizer())


def single_rows(target, ids, mask, **arguments):
    """The answers of single-row generate(), each row without its padding."""
    answers = []
    for row in range(len(ids)):
        prompt = ids[row][mask[row].bool()][None]
        out = target.model.generate(prompt, **{"max_new_tokens": NEW, "do_sample": False} | arguments)
        answers.append(out[0, prompt.shape[1] :].tolist())
    return answers


def filled_in(arguments, plain):
    """Arguments that refer to what the target says without them."""
    if arguments == "words":
        return {"bad_words_ids": [[row[0]] for row in plain] + [row[3:6] for row in plain]}
    if arguments == "bias":
        return {"sequence_bias": [[[row[0]], -4.0] for row in plain] + [[row[2:4], -9.0] for row in plain]}
    early = [row[4] for row in plain]
    tokens = {"eos_token_id": early, "suppress_tokens": [row[0] for row in plain]}
    tokens["begin_suppress_tokens"] = tokens["suppress_tokens"]
    tokens["stop_strings"] = build_tokenizer().convert_ids_to_tokens(early)
    return {name: tokens[name] if value in ("early", "said") else value for name, value in arguments.items()}


def setting(target, arguments, kind, batch=3):
    """Prompts, the arguments, single-row generate()'s answers with and without them, a drafter that knows them."""
    ids, mask = random_prompts(batch, 11)
    plain = single_rows(target, ids, mask)
    arguments = filled_in(arguments, plain)
    asked = {"tokenizer": target.tokenizer} if "stop_strings" in arguments else {}
    answers = single_rows(target, ids, mask, **arguments, **asked)
    # The script goes on where an answer ends, so that tokens are drafted and verified beyond the end.
    scripts = [ids[r][mask[r].bool()].tolist() + answers[r] + plain[r] for r in range(batch)]
    return ids, mask, arguments, answers, plain, ScriptedDrafter(scripts, VOCAB, **DRAFTERS[kind])


def padded(answers, pad=0):
    longest = max(map(len, answers))
    return [row + [pad] * (longest - len(row)) for row in answers]


@pytest.mark.parametrize("tree", ["bush", "chain"])
@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("option", OPTIONS | HARMLESS)
def test_every_row_is_single_row_generate(option, kind, tree, target):
    wanted = (OPTIONS | HARMLESS)[option]
    ids, mask, arguments, answers, plain, drafter = setting(target, wanted, kind)
    speculative = SpeculativeDecoder(target, drafter, tree=BUSH if tree == "bush" else chain(4))
    out = speculative.generate(ids, mask, **{"max_new_tokens": NEW, "do_sample": False} | arguments)
    assert out.sequences[:, ids.shape[1] :].tolist() == padded(answers)
    assert (answers != plain) == (option in OPTIONS)
    assert (out.stats.accepted > 0) == (kind != "wrong")


@pytest.mark.parametrize(
    "bug, option",
    [
        ("flat order", "logits_processor"),
        ("flat order", "prefix_allowed_tokens_fn"),
        ("flat order", "several"),
        ("committed prefix", "logits_processor"),
        ("committed prefix", "prefix_allowed_tokens_fn"),
        ("committed prefix", "repetition_penalty"),
        ("committed prefix", "no_repeat_ngram_size"),
    ],
)
def test_a_node_shown_another_path_than_its_own_is_found_out(bug, option, target, monkeypatch):
    ids, mask, arguments, answers, _, drafter = setting(target, OPTIONS[option], "perfect")
    monkeypatch.setattr("headsmith.inference.sampling._paths", WRONG_PATHS[bug])
    speculative = SpeculativeDecoder(target, drafter, tree=BUSH)
    try:
        out = speculative.generate(ids, mask, **{"max_new_tokens": NEW, "do_sample": False} | arguments)
    except AssertionError as error:
        assert "forbids" in str(error)
    else:
        assert out.sequences[:, ids.shape[1] :].tolist() != padded(answers)


def test_padding_is_not_penalised_where_pad_is_eos(target):
    """Padded generate() penalises the EOS of its padding; a row of ours is what it is alone."""
    ids, mask, arguments, _, plain, _ = setting(target, {"repetition_penalty": 1.8}, "perfect")
    pad = plain[2][3]
    ids = torch.where(mask.bool(), ids, pad)
    arguments |= {"eos_token_id": pad, "pad_token_id": pad}
    answers = single_rows(target, ids, mask, **arguments)
    out = SpeculativeDecoder(target, None).generate(ids, mask, max_new_tokens=NEW, do_sample=False, **arguments)
    assert out.sequences[:, ids.shape[1] :].tolist() == padded(answers, pad)


def test_a_constraint_is_called_with_the_number_of_its_row(target):
    ids, mask = random_prompts(3, 11)
    arguments = {"prefix_allowed_tokens_fn": lambda row, text: [10 + row], "max_new_tokens": 4, "do_sample": False}
    out = SpeculativeDecoder(target, None).generate(ids, mask, **arguments)
    assert out.sequences[:, 11:].tolist() == [[10 + row] * 4 for row in range(3)]
    hosted = target.model.generate(
        ids, attention_mask=mask, custom_generate=SpeculativeDecoder(target, None), **arguments
    )
    assert torch.equal(hosted, out.sequences)


def test_nothing_is_shown_what_generate_would_not_show(target):
    """Not what follows an EOS, nor what follows the last token that fits."""
    ids, mask, arguments, answers, _, drafter = setting(target, {"eos_token_id": "early"}, "perfect", batch=1)
    shown = []

    class Spy(LogitsProcessor):
        def __call__(self, input_ids, scores):
            shown.append(input_ids[0].tolist())
            return scores

    for new in (NEW, 3):
        shown.clear()
        expected = answers[0][:new]
        out = SpeculativeDecoder(target, drafter, tree=BUSH).generate(
            ids, mask, max_new_tokens=new, do_sample=False, logits_processor=[Spy()], **arguments
        )
        assert out.sequences[0, 11:].tolist() == expected
        assert shown == [ids[0].tolist() + expected[:n] for n in range(len(expected))]


def test_a_given_processor_is_shown_one_row_though_many_nodes_are_possible(target):
    """Sampling may reach every node; rows of one prompt share their processors."""
    ids, mask = random_prompts(1, 11)
    sizes = []

    class OneRow(LogitsProcessor):
        def __call__(self, input_ids, scores):
            sizes.append((len(input_ids), len(scores)))
            return scores

    drafter = ScriptedDrafter([ids[0].tolist()] * 2, VOCAB)
    out = SpeculativeDecoder(target, drafter, tree=BUSH).generate(
        ids.repeat(2, 1), mask.repeat(2, 1), max_new_tokens=5, do_sample=True, top_k=0, logits_processor=[OneRow()]
    )
    assert set(sizes) == {(1, 1)} and len(sizes) > 2 + out.stats.row_forwards


class Recorder(BaseStreamer):
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append((tuple(value.shape), value.tolist()))

    def end(self):
        self.calls.append("end")


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_streamer_gets_the_calls_of_generate(kind, target):
    ids, mask, arguments, answers, _, drafter = setting(target, {"eos_token_id": "early"}, kind, batch=1)
    theirs, ours, hosted = Recorder(), Recorder(), Recorder()
    arguments |= {"max_new_tokens": NEW, "do_sample": False}
    target.model.generate(ids, attention_mask=mask, streamer=theirs, **arguments)
    speculative = SpeculativeDecoder(target, drafter, tree=BUSH)
    speculative.generate(ids, mask, streamer=ours, **arguments)
    target.model.generate(ids, attention_mask=mask, custom_generate=partial(speculative, streamer=hosted), **arguments)
    assert theirs.calls == ours.calls == hosted.calls
    assert theirs.calls[-1] == "end" and len(theirs.calls) == len(answers[0]) + 2


def test_a_text_streamer_prints_the_answer(target, capsys):
    ids, mask, _, answers, _, drafter = setting(target, {}, "perfect", batch=1)
    streamer = TextStreamer(target.tokenizer, skip_prompt=True)
    SpeculativeDecoder(target, drafter, tree=BUSH).generate(
        ids, mask, max_new_tokens=NEW, do_sample=False, streamer=streamer
    )
    assert capsys.readouterr().out == target.tokenizer.decode(answers[0]) + "\n"


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("penalty", [1.0, 1.8])
def test_scores_and_logits_are_those_of_generate(kind, penalty, target):
    wanted = {"repetition_penalty": penalty, "eos_token_id": "early"}
    ids, mask, arguments, answers, _, drafter = setting(target, wanted, kind)
    arguments |= {"max_new_tokens": NEW, "do_sample": False, "output_scores": True, "output_logits": True}
    arguments |= {"return_dict_in_generate": True}
    speculative = SpeculativeDecoder(target, drafter, tree=BUSH)
    out = speculative.generate(ids, mask, **arguments)
    assert len(out.scores) == len(out.logits) == max(map(len, answers))
    for row in range(3):
        prompt = ids[row][mask[row].bool()][None]
        theirs = target.model.generate(prompt, **arguments)
        assert len(theirs.scores) == len(answers[row])
        for step in range(len(out.scores)):
            for ours, reference in ((out.scores, theirs.scores), (out.logits, theirs.logits)):
                assert ours[step].shape == (3, VOCAB) and ours[step].dtype == torch.float32
                wanted = reference[step][0] if step < len(reference) else torch.zeros(VOCAB)
                torch.testing.assert_close(ours[step][row], wanted, atol=1e-4, rtol=1e-4)
    hosted = target.model.generate(ids, attention_mask=mask, custom_generate=speculative, **arguments)
    assert isinstance(hosted, GenerateDecoderOnlyOutput) and torch.equal(hosted.sequences, out.sequences)
    torch.testing.assert_close(torch.stack(hosted.scores), torch.stack(out.scores))


def test_a_criterion_is_shown_the_scores_that_were_asked_for(target):
    lengths = []

    class Confident(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            lengths.append((input_ids.shape[1], None if scores is None else (len(scores), tuple(scores[-1].shape))))
            return torch.tensor([False])

    ids, mask, _, _, _, drafter = setting(target, {}, "perfect", batch=1)
    both = {"stopping_criteria": [Confident()], "max_new_tokens": 6, "do_sample": False}
    speculative = SpeculativeDecoder(target, drafter, tree=BUSH)
    speculative.generate(ids, mask, **both)
    assert lengths == [(11 + n, None) for n in range(1, 7)]
    lengths.clear()
    speculative.generate(ids, mask, output_scores=True, return_dict_in_generate=True, **both)
    assert lengths == [(11 + n, (n, (1, VOCAB))) for n in range(1, 7)]


def test_max_time_cuts_in_the_middle_of_a_round(target, monkeypatch):
    """generate() stops at the first token said after the time is up; its clock is asked once a token."""
    ids, mask, _, answers, _, _ = setting(target, {}, "perfect", batch=1)
    drafter = ScriptedDrafter([ids[0].tolist() + answers[0]], VOCAB)
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "time", lambda: float(next(ticks)))
    out = SpeculativeDecoder(target, drafter, tree=chain(4)).generate(
        ids, mask, max_new_tokens=NEW, do_sample=False, max_time=3.5
    )
    assert out.sequences[0, 11:].tolist() == answers[0][:4]
    assert out.stats.forwards == 1  # the round would have brought five tokens, and three were due


HOSTED = [
    "repetition_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty", "bad_words_ids", "sequence_bias",
    "min_new_tokens", "min_length", "forced_eos_token_id", "exponential_decay_length_penalty", "eos_list",
    "stop_strings", "stopping_criteria", "logits_processor", "given_penalty", "prefix_allowed_tokens_fn",
    "max_time", "begin_suppress_tokens",
]  # fmt: skip


@pytest.mark.parametrize("option", HOSTED)
@pytest.mark.parametrize("kind", ["perfect", "right_for_2_levels"])
def test_custom_generate_hosts_the_decoder(option, kind, target):
    ids, mask, arguments, answers, _, drafter = setting(target, (OPTIONS | HARMLESS)[option], kind)
    speculative = SpeculativeDecoder(target, drafter, tree=BUSH)
    out = target.model.generate(
        ids, attention_mask=mask, custom_generate=speculative, max_new_tokens=NEW, do_sample=False, **arguments
    )
    assert isinstance(out, torch.Tensor)
    assert out[:, 11:].tolist() == padded(answers)
    assert drafter.state.known[0] > 1


def test_custom_generate_counts_the_lengths_that_generate_prepared(target):
    ids, _mask, _, answers, _, drafter = setting(target, {}, "perfect", batch=1)
    speculative = SpeculativeDecoder(target, drafter, tree=BUSH)
    out = target.model.generate(ids, custom_generate=speculative, max_length=17, do_sample=False)
    assert out[0, 11:].tolist() == answers[0][:6]
    out = target.model.generate(ids, custom_generate=speculative, do_sample=False)
    assert out.shape[1] == 11 + 20  # generate()'s own default


def test_custom_generate_passes_a_generator_on(target):
    ids = torch.tensor([[3, 4, 5]])
    speculative = SpeculativeDecoder(target, None)
    sampled = {"do_sample": True, "max_new_tokens": 12}
    ours = speculative.generate(ids, generator=torch.Generator().manual_seed(3), **sampled).sequences
    seeded = [
        target.model.generate(
            ids, custom_generate=speculative, generator=torch.Generator().manual_seed(seed), **sampled
        )
        for seed in (3, 4)
    ]  # fmt: skip
    assert torch.equal(seeded[0], ours) and not torch.equal(seeded[1], ours)


def test_custom_generate_refuses_what_it_cannot_host(target):
    ids = torch.tensor([[3, 4, 5]])
    host = partial(target.model.generate, ids, custom_generate=SpeculativeDecoder(target, None), max_new_tokens=3)
    for name, value in {"num_beams": 2, "num_return_sequences": 2, "guidance_scale": 1.5}.items():
        with pytest.raises(ValueError, match=name):
            host(**{name: value}, do_sample=name == "num_return_sequences")
    with pytest.raises(ValueError, match="position_ids"):
        host(position_ids=torch.tensor([[4, 5, 6]]))
    with pytest.raises(ValueError, match="output_attentions"):
        host(output_attentions=True, return_dict_in_generate=True)
    cache = target.model(ids, use_cache=True).past_key_values
    longer = torch.tensor([[3, 4, 5, 6]])
    with pytest.raises(ValueError, match="holds 3 tokens"):
        target.model.generate(longer, custom_generate=SpeculativeDecoder(target, None), past_key_values=cache)
    with pytest.raises(ValueError, match="was made for"):
        tiny_target(seed=5).model.generate(ids, custom_generate=SpeculativeDecoder(target, None))


# ---- What is honoured, refused, indifferent ------------------------------------------------------

# A value that asks for something, for every field that is refused.
REFUSED = {
    "num_beams": 2, "num_return_sequences": 2, "use_mtp": True, "token_healing": True, "guidance_scale": 1.5,
    "watermarking_config": WatermarkingConfig(), "output_attentions": True, "output_hidden_states": True,
    "is_assistant": True, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2, "assistant_early_exit": 2,
    "speculation_type": "dflash", "penalty_alpha": 0.6, "dola_layers": "low", "diversity_penalty": 0.5,
    "num_beam_groups": 2, "constraints": [1], "force_words_ids": [[4]],
}  # fmt: skip


def test_every_field_of_a_generation_config_is_honoured_refused_or_indifferent():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert HONOURED | INDIFFERENT | set(REFUSED) == fields
    assert not HONOURED & INDIFFERENT and not (HONOURED | INDIFFERENT) & set(REFUSED)
    assert not_honoured(GenerationConfig(), HONOURED) == {}
    config = GenerationConfig()
    config.some_field_of_a_later_release = 3
    assert not_honoured(config, HONOURED) == {"some_field_of_a_later_release": 3}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_field_and_a_remedy(name, target):
    config = GenerationConfig(max_new_tokens=3)
    setattr(config, name, REFUSED[name])
    config.do_sample = name == "num_return_sequences"  # greedy, transformers itself refuses it
    with pytest.raises(ValueError, match=f"^{name}=.*leave it out"):
        SpeculativeDecoder(target, None).generate(torch.tensor([[3, 4]]), generation_config=config)


def test_every_honoured_field_that_changes_greedy_text_is_among_the_options():
    sampling = WARPED | {"top_h"}
    tried = {name for options in (OPTIONS | HARMLESS).values() if isinstance(options, dict) for name in options}
    tried |= {"bad_words_ids", "sequence_bias", "output_scores", "output_logits"}
    assert HONOURED - sampling <= tried


@pytest.mark.parametrize("field", ["repetition_penalty", "no_repeat_ngram_size", "stop_strings", "min_new_tokens"])
def test_self_generation_is_told_what_it_does_not_apply(field):
    """A plain loop over the engine knows no processors: to it these fields are still not honoured."""
    assert field in not_honoured(GenerationConfig(**{field: 3}))


def test_other_modes_and_stateful_processors_are_refused_by_name(target):
    ids = torch.tensor([[3, 4, 5]])
    speculative = SpeculativeDecoder(target, None)
    for name in ("assistant_model", "negative_prompt_ids", "past_key_values", "inputs_embeds"):
        with pytest.raises(ValueError, match=name):
            speculative.generate(ids, max_new_tokens=2, **{name: object()})
    mark = WatermarkingConfig().construct_processor(VOCAB, "cpu")
    with pytest.raises(ValueError, match="WatermarkLogitsProcessor keeps state"):
        speculative.generate(ids, max_new_tokens=2, logits_processor=[mark])
    with pytest.raises(ValueError, match="max_length"):
        speculative.generate(ids, max_length=3)
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        SpeculativeDecoder(tiny_target(), None).generate(ids, max_new_tokens=2, stop_strings=["x"])


def test_a_processor_that_forbids_every_token_is_named(target):
    class Never(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -torch.inf)

    for sample in (False, True):
        with pytest.raises(ValueError, match="every token"):
            SpeculativeDecoder(target, None).generate(
                torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=sample, logits_processor=[Never()]
            )


def watched(call, shapes):
    def watching(self, input_ids, scores):
        assert input_ids is None
        shapes.append(tuple(scores.shape))
        return call(self, input_ids, scores)

    return watching


@pytest.mark.parametrize(
    "processors, arguments",
    [
        (0, {"do_sample": False}),
        (1, {"do_sample": False, "suppress_tokens": [3]}),
        (5, {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "suppress_tokens": [3], "top_h": 0.9, "top_k": 9}),
    ],
)
def test_prefix_free_processors_see_all_nodes_at_once_and_no_text(processors, arguments, target, monkeypatch):
    """The common path does no work a node."""
    ids, mask, _, _, _, drafter = setting(target, {}, "perfect")
    shapes = []
    for kind in PREFIX_FREE:
        monkeypatch.setattr(kind, "__call__", watched(kind.__call__, shapes))
    out = SpeculativeDecoder(target, drafter, tree=BUSH).generate(ids, mask, max_new_tokens=4, **arguments)
    rounds = [(3, VOCAB)] + [(3 * BUSH.nodes, VOCAB)] * out.stats.forwards
    assert shapes == [shape for shape in rounds for _ in range(processors)]


# ---- Typical acceptance --------------------------------------------------------------------------


def test_typical_acceptance_is_named_and_takes_more(target):
    ids, mask, _, _, _, drafter = setting(target, {}, "perfect")
    sampled = {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": NEW}
    accepted = {}
    for kind in ("lossless", "typical"):
        speculative = SpeculativeDecoder(target, drafter, tree=BUSH, acceptance=kind)
        out = speculative.generate(ids, mask, generator=torch.Generator().manual_seed(0), **sampled)
        accepted[kind] = out.stats.accepted
        assert ("typical acceptance (not lossless)" in out.stats.tree) == (kind == "typical")
    assert accepted["typical"] > accepted["lossless"]
    strict = SpeculativeDecoder(target, drafter, tree=BUSH, acceptance="typical", epsilon=1.0, delta=50.0)
    assert strict.generate(ids, mask, **sampled).stats.accepted == 0
    assert SpeculativeDecoder(target, drafter).acceptance.rule == "lossless"


def test_typical_acceptance_refuses_what_does_not_go_with_it(target):
    with pytest.raises(ValueError, match="samples its children"):
        SpeculativeDecoder(target, None, tree=chain(2, sampled=True), acceptance="typical")
    with pytest.raises(ValueError, match="'lossless' or 'typical', not 'greedy'"):
        SpeculativeDecoder(target, None, acceptance="greedy")
    with pytest.raises(ValueError, match="epsilon belong to acceptance='typical'"):
        SpeculativeDecoder(target, None, epsilon=0.1)
    with pytest.raises(ValueError, match="above 0"):
        SpeculativeDecoder(target, None, acceptance="typical", delta=-1.0)
    with pytest.raises(ValueError, match="do_sample=True"):
        SpeculativeDecoder(target, None, acceptance="typical").generate(torch.tensor([[3]]), max_new_tokens=2)
