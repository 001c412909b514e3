"""Reading models: safetensors and GGUF give the same weights; whatever is wrong is one clear `ModelError`."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from leftfold.executor.config import ARCHITECTURES, ModelConfig, from_gguf, from_hugging_face
from leftfold.executor.errors import ModelError
from leftfold.executor.torch_executor import TorchExecutor
from leftfold.executor.weights import load
from leftfold.kernels.rotary import inverse_frequencies
from tests.plan_stream import generate
from tests.tiny_models import edit_config, make

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_gguf(folder: Path, file: Path, kind: gguf.GGMLQuantizationType, **fields: float) -> Path:
    """Convert a saved model as GGUF converters do: Llama's query and key rows are interleaved by rotated pair."""
    model = load(folder)
    config = model.config
    writer = gguf.GGUFWriter(file, config.family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_theta)
    for key, value in fields.items():
        getattr(writer, f"add_{key}")(value)

    def add(name: str, source: str) -> None:
        weight = model.get(source).numpy()
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(source.split(".")[-2])
        if config.family == "llama" and heads:
            weight = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
            weight = weight.swapaxes(1, 2).reshape(model.get(source).shape)
        used = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(weight), used), raw_dtype=used)

    add("token_embd.weight", "model.embed_tokens.weight")
    add("output_norm.weight", "model.norm.weight")
    if not config.tied_embeddings:
        add("output.weight", "lm_head.weight")
    for layer in range(config.num_layers):
        for name, source in LAYER_NAMES.items():
            for part in ("weight", "bias"):
                if model.has(f"model.layers.{layer}.{source}.{part}"):
                    add(f"blk.{layer}.{name}.{part}", f"model.layers.{layer}.{source}.{part}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("kind", ["llama", "llama-tied-llama3-rope", "qwen2", "qwen3"])
def test_gguf_in_float32_gives_the_very_weights_of_safetensors(kind: str, tmp_path: Path) -> None:
    reference = make(kind, tmp_path / "folder")
    ours = load(write_gguf(tmp_path / "folder", tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32))
    for name, weight in reference.named_parameters():
        assert torch.equal(ours.get(name), weight), name
    folder = load(tmp_path / "folder").config
    for field in ModelConfig.__slots__:
        if field not in ("rope_scaling", "eos_token_ids"):
            read, wanted = getattr(ours.config, field), getattr(folder, field)
            assert read == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), field


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_gguf_is_near_and_runs(quantization: str, tmp_path: Path) -> None:
    make("llama", tmp_path / "folder")
    kind = gguf.GGMLQuantizationType[quantization]
    # Blocks of 32 must divide every row; the tiny model's inner size of 112 does not.
    edit_config(tmp_path / "folder", intermediate_size=96)
    tensors = {name: load(tmp_path / "folder").get(name) for name in weight_names(tmp_path / "folder")}
    for name, tensor in tensors.items():
        if ".mlp." in name:
            tensors[name] = (tensor[:, :96] if "down" in name else tensor[:96]).contiguous()
    save_file(tensors, tmp_path / "folder" / "model.safetensors")
    file = write_gguf(tmp_path / "folder", tmp_path / "model.gguf", kind)
    exact, near = load(tmp_path / "folder"), load(file)
    for name in tensors:
        error = (near.get(name) - exact.get(name)).abs().max() / exact.get(name).abs().max()
        assert error < (0.15 if quantization[1] in "45" else 0.02), name
    executor = TorchExecutor(file, num_pages=8, page_size=4, max_model_len=32)
    assert len(generate(executor, [1, 2, 3], 5, num_pages=8, page_size=4)) == 5


def weight_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def test_rope_frequencies_in_a_gguf_divide_the_speeds(tmp_path: Path) -> None:
    make("llama", tmp_path / "folder")
    file = write_gguf(tmp_path / "folder", tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    plain = load(file)
    divided = type(plain)(
        plain.config,
        lambda name: name == "rope_freqs" or plain.has(name),
        lambda name: torch.full((8,), 2.0) if name == "rope_freqs" else plain.get(name),
    )
    executor = TorchExecutor(divided, num_pages=4, page_size=4, max_model_len=16)
    angles = torch.arange(16.0)[:, None] * inverse_frequencies(16, 10000.0)[None, :] / 2
    assert torch.allclose(executor.model.cos[:, :8], angles.cos())


def test_a_folder_that_holds_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    make("qwen2", tmp_path / "folder")
    (tmp_path / "other").mkdir()
    write_gguf(tmp_path / "folder", tmp_path / "other" / "m.gguf", gguf.GGMLQuantizationType.F32)
    assert load(tmp_path / "other").config.family == "qwen2"
    (tmp_path / "other" / "n.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="holds 2 GGUF files; name one"):
        load(tmp_path / "other")


@pytest.mark.parametrize("size", [0, 3, 24, 100, 2000, 0.3, 0.9, 0.999])
def test_a_truncated_gguf_is_a_clear_error(size: float, tmp_path: Path) -> None:
    make("llama", tmp_path / "folder")
    file = write_gguf(tmp_path / "folder", tmp_path / "model.gguf", gguf.GGMLQuantizationType.F16)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(size * len(whole)) if 0 < size < 1 else int(size)])
    with pytest.raises(ModelError, match="model.gguf: it ends too early or is damaged; fetch it again"):
        TorchExecutor(file, num_pages=4, page_size=4, max_model_len=16)


def test_a_file_that_is_no_gguf_is_a_clear_error(tmp_path: Path) -> None:
    for name, content in (("model.gguf", b"\x80\x04 pickled?" * 50), ("model.bin", b"x")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=name):
            load(tmp_path / name)


@pytest.mark.parametrize("size", [0, 5, 200, 0.5, 0.99])
def test_truncated_safetensors_are_a_clear_error(size: float, tmp_path: Path) -> None:
    make("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(size * len(whole)) if 0 < size < 1 else int(size)])
    with pytest.raises(ModelError, match="cannot read .*model.safetensors"):
        TorchExecutor(tmp_path, num_pages=4, page_size=4, max_model_len=16)


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    make("llama", tmp_path)
    edit_config(tmp_path, num_hidden_layers=4)
    with pytest.raises(ModelError, match=r"lack the tensor 'model.layers.3.input_layernorm.weight'"):
        TorchExecutor(tmp_path, num_pages=4, page_size=4, max_model_len=16)
    edit_config(tmp_path, num_hidden_layers=3, intermediate_size=100)
    with pytest.raises(
        ModelError, match=r"gate_proj.weight' has shape \(112, 96\); its configuration says \(100, 96\)"
    ):
        TorchExecutor(tmp_path, num_pages=4, page_size=4, max_model_len=16)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    make("llama", tmp_path)
    index = {"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="names files outside its folder"):
        load(tmp_path)


def test_nothing_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model at"):
        load(tmp_path / "absent")
    with pytest.raises(ModelError, match="holds neither"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"cannot read .*config.json"):
        load(tmp_path)


BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "names GPT2LMHeadModel as architecture; supported: LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "names mamba as architecture"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized by 'awq' are not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope scaling type 'yarn' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2}}, "rope_scaling lacks 'low_freq_factor'"),
        ({"partial_rotary_factor": 0.5}, "rotated in part"),
        ({"vocab_size": None}, "config.json lacks 'vocab_size'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0; it must be a whole number from 1 to 10000"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"rope_scaling": "x"}, "rope_scaling = 'x'; it must be an object"),
        ({"rope_theta": "a"}, "rope_theta = 'a'; it must be a number above 0"),
        ({"eos_token_id": "x"}, "eos_token_id = 'x'; it must be a token id"),
        ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
        ({"sliding_window": "x"}, "sliding_window = 'x'"),
        ({"hidden_size": 8, "num_attention_heads": 16, "num_key_value_heads": 16}, "head_dim = 0"),
        ({"num_key_value_heads": 3}, "2 attention heads cannot share 3"),
        ({"head_dim": 7}, "head size 7 cannot be rotated"),
    ],
)
def test_what_is_not_supported_is_said(fields: dict, message: str) -> None:
    config = {key: value for key, value in (BASE | fields).items() if value is not None}
    with pytest.raises(ModelError, match=message):
        from_hugging_face(config)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
RICH = {
    **BASE, "head_dim": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
    "rope_scaling": None, "rope_parameters": None, "sliding_window": 16, "use_sliding_window": True,
    "max_window_layers": 1, "layer_types": None, "eos_token_id": 2, "tie_word_embeddings": True, "model_type": "llama",
    "quantization_config": None, "partial_rotary_factor": 1.0,
}  # fmt: skip
GGUF = {
    "general.architecture": "llama", "llama.attention.head_count": 4, "llama.embedding_length": 32,
    "llama.block_count": 2, "llama.attention.key_length": 8, "llama.rope.dimension_count": 8,
    "llama.feed_forward_length": 64, "llama.attention.head_count_kv": 2, "llama.context_length": 128,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4, "llama.rope.scaling.type": "linear",
    "llama.rope.scaling.factor": 2.0, "llama.attention.sliding_window": 4, "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip


@given(st.data())
def test_malformed_configurations_are_model_errors_or_sound(data: st.DataObject) -> None:
    gguf_file = data.draw(st.booleans())
    whole = GGUF if gguf_file else RICH | {"architectures": [data.draw(st.sampled_from(sorted(ARCHITECTURES)))]}
    changed = whole | {
        key: data.draw(ANYTHING) for key in data.draw(st.sets(st.sampled_from(sorted(whole)), max_size=3))
    }
    try:
        read = from_gguf(changed, {"token_embd.weight": (50, 32)}) if gguf_file else from_hugging_face(changed)
    except ModelError as error:
        assert str(error)
        return
    sizes = (read.vocab_size, read.hidden_size, read.num_heads, read.head_dim, read.max_positions, *read.eos_token_ids)
    assert all(type(size) is int for size in sizes) and len(read.windows) == read.num_layers
    assert all(window is None or (type(window) is int and window > 0) for window in read.windows)
    speeds = inverse_frequencies(min(read.head_dim - read.head_dim % 2, 64), read.rope_theta, read.rope_scaling)
    assert bool(torch.isfinite(speeds).all())


def test_rope_is_read_from_old_and_new_keys() -> None:
    old = from_hugging_face(BASE | {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}})
    new = from_hugging_face(BASE | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4}})
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (5e5, {"type": "linear", "factor": 4.0})
    assert from_hugging_face(BASE | {"rope_scaling": None}).rope_scaling is None


def test_windows_slide_only_where_switched_on() -> None:
    qwen = BASE | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "max_window_layers": 2}
    assert from_hugging_face(qwen).windows == (None,) * 4
    assert from_hugging_face(qwen | {"use_sliding_window": True}).windows == (None, None, 16, 16)
    mistral = BASE | {"architectures": ["MistralForCausalLM"], "sliding_window": 16}
    assert from_hugging_face(mistral).windows == (16,) * 4
    assert from_hugging_face(mistral | {"sliding_window": None}).windows == (None,) * 4


def test_unknown_dtypes_and_kernels_are_refused(tmp_path: Path) -> None:
    make("llama", tmp_path)
    with pytest.raises(ModelError, match="dtype 'float8' is unknown; there are: auto, float32, bfloat16"):
        TorchExecutor(tmp_path, num_pages=4, page_size=4, max_model_len=16, dtype="float8")


def test_a_second_copy_of_the_weights_beside_the_model_is_left_alone(tmp_path: Path) -> None:
    make("llama", tmp_path)
    name = "model.norm.weight"
    wanted = load(tmp_path).get(name)
    save_file({name: torch.zeros(3), "tok_embeddings.weight": torch.zeros(3)}, tmp_path / "zz.safetensors")
    model = load(tmp_path)
    assert torch.equal(model.get(name), wanted) and not model.has("tok_embeddings.weight")
