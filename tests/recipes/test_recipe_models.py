# SPDX-License-Identifier: Apache-2.0
"""Models that a recipe can't train as it should: each is refused in one sentence."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    CodeGenConfig,
    CodeGenForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMConfig,
    XLMWithLMHeadModel,
)

from deepytorch.recipes import bert_mlm, llama_sft
from deepytorch.recipes.base.config import RecipeError
from deepytorch.recipes.data.text import byte_tokenizer
from deepytorch.recipes.models.language import load_model, refuse_beyond_positions, save_checkpoint
from deepytorch.recipes.runner.engines import own_state, refuse_other_weights

SIZE = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = {**SIZE, "intermediate_size": 16, "max_position_embeddings": 24}


def gpt2():
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=259, n_positions=24, n_embd=16, n_layer=1, n_head=2)
    )


def llama(**others):
    size = {**SIZE, "intermediate_size": 16, "max_position_embeddings": 24, **others}
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, **size))


def bart():
    size = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    return BartForCausalLM(BartConfig(vocab_size=259, encoder_layers=1, **size))


def xlm():
    return XLMWithLMHeadModel(XLMConfig(vocab_size=259, emb_dim=16, n_layers=1, n_heads=2))


def gptj():
    size = {"n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4}
    return GPTJForCausalLM(GPTJConfig(vocab_size=259, n_positions=24, **size))


def codegen():
    size = {"n_embd": 16, "n_layer": 1, "n_head": 4, "rotary_dim": 4}
    return CodeGenForCausalLM(CodeGenConfig(vocab_size=259, n_positions=24, n_ctx=24, **size))


def opt():
    size = {**SIZE, "ffn_dim": 16, "word_embed_proj_dim": 16, "max_position_embeddings": 24}
    return OPTForCausalLM(OPTConfig(vocab_size=259, **size))


def bert(is_decoder=True):
    return BertLMHeadModel(BertConfig(vocab_size=259, is_decoder=is_decoder, **BERT))


def seeing_bert():
    return bert(is_decoder=False)


def roberta():
    return RobertaForMaskedLM(RobertaConfig(vocab_size=259, pad_token_id=1, **BERT))


@pytest.mark.parametrize(
    ("make", "trains"),
    [(llama, True), (bert, True), (seeing_bert, False), (bart, False), (xlm, False)],
)
def test_a_model_that_does_not_predict_the_next_token_is_refused(make, trains, tmp_path):
    tokenizer, model = byte_tokenizer(), make()
    save_checkpoint(model, tokenizer, tmp_path)
    if trains:
        assert type(load_model(str(tmp_path), tokenizer)) is type(model)
        return
    name = type(model).__name__
    with pytest.raises(RecipeError, match=f"is a {name} that does not predict each token from"):
        load_model(str(tmp_path), tokenizer)


@pytest.mark.parametrize(
    ("make", "most"),
    [(gpt2, 24), (bert, 24), (opt, 24), (roberta, 22), (gptj, 24), (codegen, 24), (llama, None)],
)
def test_examples_end_where_a_table_of_positions_does(make, most):
    model = make()
    ids = torch.full((1, (most or 99) + 1), 5)
    if most is None:
        refuse_beyond_positions(model, ids.shape[1])  # positions that are computed have no end
        model(input_ids=ids)
        return
    refuse_beyond_positions(model, most)
    model(input_ids=ids[:, :most])
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=ids)
    with pytest.raises(RecipeError, match=rf"{most + 1} tokens, .* {most} positions: set max_le"):
        refuse_beyond_positions(model, most + 1)


def words(model, data, output_dir):
    tiny = ["device=cpu", "steps=1", "batch_size=1", "held_out=1", "max_length=99"]
    return [f"model={model}", f"data={data}", f"output_dir={output_dir}", *tiny]


@pytest.mark.parametrize("recipe", [llama_sft, bert_mlm])
def test_recipes_say_how_long_examples_may_be(recipe, tmp_path, capsys):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "</s>"})
    save_checkpoint(gpt2() if recipe is llama_sft else roberta(), tokenizer, tmp_path / "model")
    text = 50 * "x"
    data = tmp_path / "data.jsonl"
    data.write_text(2 * f"{json.dumps({'instruction': text, 'output': text})}\n")
    assert recipe.main(words(tmp_path / "model", data, tmp_path / "runs")) == 2
    torch.distributed.destroy_process_group()  # an error leaves that to the process's end
    said = capsys.readouterr().err
    assert "an example has 99 tokens" in said
    assert f"set max_length={24 if recipe is llama_sft else 22}" in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"intermediate_size": 24}, "cannot load the model of model=.*mismatched_sizes"),
        ({"num_attention_heads": 5}, "cannot load the model of model=.*number of attention heads"),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_sentence(settings, message, tmp_path):
    tokenizer = byte_tokenizer()
    save_checkpoint(llama(), tokenizer, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    with pytest.raises(RecipeError, match=message):
        load_model(str(tmp_path), tokenizer)


def test_an_adapter_is_not_taken_for_its_base_model(tmp_path):
    tokenizer, base = byte_tokenizer(), tmp_path / "base"
    save_checkpoint(llama(), tokenizer, base)
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora)
    save_checkpoint(adapted, tokenizer, tmp_path / "adapter")
    with pytest.raises(RecipeError, match="is an adapter, which would be lost: .*merge_adapter"):
        load_model(str(tmp_path / "adapter"), tokenizer)


def test_what_of_tied_weights_is_frozen_is_in_no_checkpoint():
    adapted = get_peft_model(
        llama(tie_word_embeddings=True), LoraConfig(target_modules="all-linear")
    )
    assert own_state(adapted)
    assert all("lora_" in name for name in own_state(adapted))


def test_other_weights_than_the_checkpoints_are_named_once():
    def adapted(rank):
        return get_peft_model(llama(), LoraConfig(r=rank, target_modules="all-linear"))

    saved = own_state(adapted(4))
    refuse_other_weights(adapted(4), saved)
    with pytest.raises(RecipeError, match=r"q_proj.lora_A.default.weight is \(8, 16\) here, \(4, "):
        refuse_other_weights(adapted(8), saved)
    with pytest.raises(RecipeError, match="embed_tokens.weight is .* here, missing there"):
        refuse_other_weights(llama(), saved)
