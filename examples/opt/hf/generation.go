package hf

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
)

// steers are the keys of generation_config.json, and of config.json as older versions wrote it, that make
// transformers' generate choose otherwise than by the logits token by token, with the values that have no effect.
// This package does not implement such generators, so other values are refused.
var steers = map[string][]string{
	"assistant_early_exit":             {},
	"bad_words_ids":                    {"[]"},
	"begin_suppress_tokens":            {"[]"},
	"constraints":                      {},
	"custom_generate":                  {},
	"diversity_penalty":                {"0"},
	"dola_layers":                      {},
	"encoder_no_repeat_ngram_size":     {"0"},
	"encoder_repetition_penalty":       {"1"},
	"exponential_decay_length_penalty": {},
	"force_words_ids":                  {"[]"},
	"forced_bos_token_id":              {},
	"forced_decoder_ids":               {"[]"},
	"forced_eos_token_id":              {},
	"guidance_scale":                   {"1"},
	"max_time":                         {},
	"min_length":                       {"0"},
	"min_new_tokens":                   {"0"},
	"no_repeat_ngram_size":             {"0"},
	"num_beam_groups":                  {"1"},
	"num_beams":                        {"1"},
	"penalty_alpha":                    {"0"},
	"remove_invalid_values":            {"false"},
	"repetition_penalty":               {"1"},
	"sequence_bias":                    {"{}", "[]"},
	"stop_strings":                     {"[]"},
	"suppress_tokens":                  {"[]"},
	"token_healing":                    {"false"},
	"watermarking_config":              {},
}

// chosen are the keys of generation_config.json that the caller decides here, or that change no text: how tokens are
// chosen and how many, further outputs, and how they are computed.
var chosen = strings.Fields(`
	do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff renormalize_logits seed
	max_length max_new_tokens num_return_sequences
	bos_token_id decoder_start_token_id eos_token_id pad_token_id
	early_stopping length_penalty low_memory
	output_attentions output_hidden_states output_logits output_scores return_dict_in_generate return_legacy_cache
	cache_config cache_implementation compile_config continuous_batching_config disable_compile prefill_chunk_size use_cache
	assistant_confidence_threshold assistant_ensemble_weight assistant_lookbehind max_cache_len speculation_type is_assistant max_matching_ngram_size num_assistant_tokens
	num_assistant_tokens_schedule prompt_lookup_num_tokens target_lookbehind use_mtp mtp_num_tokens
	generation_kwargs _commit_hash _from_model_config transformers_version trust_remote_code chat_format`)

// otherwise are the keys of config.json that make transformers' OPT another model, with the values that do not.
var otherwise = map[string][]string{
	"quantization_config": {},
	"compression_config":  {},
	"pruned_heads":        {"{}"},
	"is_encoder_decoder":  {"false"},
	"add_cross_attention": {"false"},
}

// generation reads the tokens that end a text, from generation_config.json and config.json, and refuses settings that
// would change the text.
func (f *Folder) generation(config []byte) error {
	p, err := newParser(f.in.path("config.json"), config)
	if err != nil {
		return err
	}
	if f.eos = p.tokens("eos_token_id", f.config.VocabSize); f.eos == nil && f.config.EOS >= 0 {
		f.eos = []int{f.config.EOS}
	}
	p.refuse(otherwise, "which makes another model")
	p.refuse(steers, "which texts here would not follow")
	if p.err != nil || !f.in.exists("generation_config.json") {
		return p.err
	}
	data, err := f.in.text("generation_config.json", maxConfig)
	if err != nil {
		return err
	}
	g, err := newParser(f.in.path("generation_config.json"), data)
	if err != nil {
		return err
	}
	g.refuse(steers, "which texts here would not follow")
	for _, key := range slices.Sorted(maps.Keys(g.fields)) {
		if raw := string(g.fields[key]); steers[key] == nil && !slices.Contains(chosen, key) && raw != "null" && raw != "false" && g.err == nil {
			g.err = fail(ErrUnsupported, g.file, "%s is %s, and the key is not known", quote(key), quote(raw))
		}
	}
	if ids := g.tokens("eos_token_id", f.config.VocabSize); ids != nil {
		f.eos = ids
	}
	return g.err
}

// refuse keeps an error for the first key with a value other than null and the given values.
func (p *configParser) refuse(keys map[string][]string, why string) {
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if p.null(key) || p.err != nil {
			continue
		}
		raw := strings.Join(strings.Fields(string(p.fields[key])), "")
		var number float64
		if json.Unmarshal(p.fields[key], &number) == nil { // 1.0 is 1
			data, _ := json.Marshal(number)
			raw = string(data)
		}
		if !slices.Contains(keys[key], raw) {
			p.err = fail(ErrUnsupported, p.file, "%s is %s, %s", key, quote(string(p.fields[key])), why)
		}
	}
}
