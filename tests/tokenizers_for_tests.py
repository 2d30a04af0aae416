"""Tiny byte-level tokenizers with the kinds of chat template that real models have."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin|>{% if date is defined %}Today: {{ date }}{% endif %}{% for m in messages %}"
    "<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
# keeps the reasoning of the last answer only, as Qwen3 does
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# ends the text once more where no answer is wanted, as Phi-3 does
TWO_ENDS = CHATML.removesuffix("{% endif %}") + "{% else %}<|endoftext|>{% endif %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
# opens an answer with a thought that no finished answer contains
OPENS_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TOOLS = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}")
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin|>", "<|start|>", "<|stop|>", "<|eot|>")


def build_tokenizer(chat_template: str | None = CHATML, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A token a byte, but for two line ends and for " H", which are one; pad is eos, as in most trainers."""
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"ĊĊ": len(vocabulary), "ĠH": len(vocabulary) + 1}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ"), ("Ġ", "H")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(_SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos, pad_token=eos)
    tokenizer.chat_template = chat_template
    return tokenizer
