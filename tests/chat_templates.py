"""Chat templates of three families, each with the habits that break a search for answers.

    qwen    Qwen2.5 and Qwen3's forms: <|im_start|>role ... <|im_end|>; a system message of its own
            where there is none. QWEN3 drops the thoughts of earlier turns
    llama   Llama 3.1's: headers, trimmed content, a preamble in the system message, <|eot_id|>
    smol    SmolLM2's: as Qwen2.5, with other words

Written from what the families' documentation says of the format; no tool calls.
"""

QWEN = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}"
    "{% set first = messages[0]['role'] == 'system' %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: 2023\\n' }}"
    "{{ (messages[0]['content'] | trim if first else '') + '<|eot_id|>' }}"
    "{% for message in messages[1 if first else 0:] %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
SMOL = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant named SmolLM<|im_end|>\\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# With the blocks that say which text is the assistant's; here the thoughts are not trained.
GENERATION = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{{ '<think>' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>")
CONTROL += ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def byte_tokenizer(chat_template, *, front=""):
    """A tokenizer of bytes with the families' control tokens; `front` is put before plain text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({x: i for i, x in enumerate([*CONTROL, *letters])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if front:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{front} $A", special_tokens=[(front, CONTROL.index(front))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(CONTROL[2:]),
    )
    tokenizer.chat_template = chat_template
    return tokenizer
