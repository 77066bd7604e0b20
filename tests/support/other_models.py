"""What else transformers calls a causal language model, and why it is not in the sweep. With `FAMILIES` this is all."""

from __future__ import annotations

RECURRENT = "recurrent state (linear attention, a state space or a convolution) in some layers, in all releases"
INDEXED = "layers that attend to tokens picked by an index"

# Decoders that are refused, with the reason. tests/sweep asks for the refusal of each.
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "inkling_text", "inkling2_text", "jamba"),
            *("inkling2_loop_text", "kimi_linear", "lara_mini", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h"),
            *("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma"),
            *("rwkv", "xlstm", "zamba", "zamba2", "zaya"),
        ),
        RECURRENT,
    ),
    **dict.fromkeys(("axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"), INDEXED),
    "deepseek_v4": "layers that attend to a compressed past",
    "blt": "an encoder of bytes before the decoder",
    "cpmant": "a prompt of its own before the text, and a learned bias for each distance of tokens",
    "dbrx": "experts of its own, which loop over what was routed",
    "diffllama": "attends twice in a layer",
    "doge": "a mask computed from the values of the tokens",
    "dory": "layers that run several times",
    "hrm_text": "layers that run several times",
    "jetmoe": "a mixture of attention heads, and experts of its own",
    "longcat_flash": "experts of its own, some of which pass their input on",
    "reformer": "attends within buckets of hashes",
}

# Convertible only in a form that nobody releases: name -> (why, config values of the released form).
HYBRIDS: dict[str, tuple[str, dict[str, object]]] = {
    name: (RECURRENT, dict(layer_types=["conv", "full_attention"])) for name in ("lfm2", "lfm2_moe")
}

ENCODER = "an encoder: attention is not causal"
ENCODER_DECODER = "an encoder and cross-attention"
WRAPPER = "a model of images or sound around a decoder"
DRAFT = "a draft that reads the keys and values of another model"
# Not decoder language models, or other names of families in the sweep.
OTHERS: dict[str, str] = {
    **dict.fromkeys(
        (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
            *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm"),
            *("xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod"),
        ),
        ENCODER,
    ),
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen"),
            *("musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper"),
        ),
        ENCODER_DECODER,
    ),
    **dict.fromkeys(
        (
            *("dots3_note", "emu3", "fuyu", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2"),
            *("llama4", "mllama", "moshi", "moss_transcribe_diarize", "phi4_multimodal", "qwen3_5", "qwen3_5_moe"),
            "qwen4_exp",
        ),
        WRAPPER,
    ),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), DRAFT),
    "gpt-sw3": "another name of gpt2",
}
# The version of transformers whose names the tables above cover.
COVERED = "5.24"
