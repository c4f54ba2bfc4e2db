package decoder

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
)

const generationFile = "generation_config.json"

// steers lists the fields of generation_config.json that make transformers' generate choose tokens in a way that [Sampling] does
// not support. Older versions of transformers wrote these fields to config.json. The value of an entry lists the field's values
// without effect. Any other value is an error.
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
	"sequence_bias":                    {"{}", "[]"},
	"stop_strings":                     {"[]"},
	"token_healing":                    {"false"},
	"watermarking_config":              {},
}

// steersDraws is like steers, for fields that have an effect only if do_sample is true.
var steersDraws = map[string][]string{
	"epsilon_cutoff": {"0", "1"},
	"eta_cutoff":     {"0", "1"},
	"top_h":          {},
}

// chosen lists the ignored fields of generation_config.json: the number of tokens, which the caller decides, and the further
// outputs and the implementation of generate, which do not change the text.
var chosen = strings.Fields(`
	renormalize_logits seed max_length max_new_tokens num_return_sequences
	bos_token_id decoder_start_token_id eos_token_id pad_token_id
	early_stopping length_penalty low_memory
	output_attentions output_hidden_states output_logits output_scores return_dict_in_generate return_legacy_cache
	cache_config cache_implementation compile_config continuous_batching_config disable_compile prefill_chunk_size use_cache
	assistant_confidence_threshold assistant_ensemble_weight assistant_lookbehind max_cache_len speculation_type is_assistant
	max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule prompt_lookup_num_tokens target_lookbehind use_mtp
	mtp_num_tokens generation_kwargs _commit_hash _from_model_config transformers_version trust_remote_code chat_format`)

// generation holds the end tokens and the sampling of a model's files.
type generation struct {
	ends     []int // tokens that end a text
	sampling Sampling
}

// readGeneration reads generation_config.json. file is the file's path, and data is its content. data is nil if the model has no
// such file. As in transformers, generation_config.json overrides config.json, but eos_token_id of config.json is used if
// generation_config.json has no eos_token_id.
func readGeneration(config *Config, file string, data []byte, vocab int) (g generation, err error) {
	g.ends = config.ids("eos_token_id", vocab)
	config.refuseAll(steers)
	if config.err == nil && data == nil {
		g.sampling = config.sampling(vocab)
	}
	if config.err != nil || data == nil {
		return g, config.err
	}
	c := parseConfig(file, "", data)
	if ids := c.ids("eos_token_id", vocab); ids != nil {
		g.ends = ids
	}
	c.refuseAll(steers)
	g.sampling = c.sampling(vocab)
	c.ignore(chosen...)
	c.end()
	return g, c.err
}

// sampling reads the sampling fields. An absent field has the default of transformers
// (GenerationConfig._get_default_generation_params).
func (c *Config) sampling(vocab int) (s Sampling) {
	x := struct{ temperature, topP, minP, typicalP, repetition float64 }{1, 1, 0, 1, 1}
	topK := int64(50)
	draws := c.Flag("do_sample", false)
	c.Read("temperature", &x.temperature)
	c.Read("top_k", &topK)
	c.Read("top_p", &x.topP)
	c.Read("min_p", &x.minP)
	c.Read("typical_p", &x.typicalP)
	c.Read("repetition_penalty", &x.repetition)
	if !(x.repetition > 0) {
		c.fail(ErrFormat, "repetition_penalty is %v, not above 0", x.repetition)
	}
	if x.repetition != 1 {
		s.RepetitionPenalty = x.repetition
	}
	s.Forbidden = c.ids("suppress_tokens", vocab)
	c.ignore("suppress_tokens")
	if !draws {
		c.ignore(slices.Collect(maps.Keys(steersDraws))...)
		return s
	}
	c.refuseAll(steersDraws)
	switch {
	case !(x.temperature > 0):
		c.fail(ErrFormat, "do_sample is true, and temperature is %v, not above 0", x.temperature)
	case topK < 0:
		c.fail(ErrFormat, "top_k is %d, not at least 0", topK)
	case !(x.topP >= 0 && x.topP <= 1):
		c.fail(ErrFormat, "top_p is %v, not in [0, 1]", x.topP)
	case !(x.minP >= 0 && x.minP <= 1):
		c.fail(ErrFormat, "min_p is %v, not in [0, 1]", x.minP)
	case !(x.typicalP > 0 && x.typicalP <= 1):
		c.fail(ErrFormat, "typical_p is %v, not in (0, 1]", x.typicalP)
	}
	s.Temperature, s.MinP = x.temperature, x.minP
	if topK < int64(vocab) {
		s.TopK = int(max(topK, 0))
	}
	switch x.topP {
	case 0:
		s.TopK = 1 // the set has at least one token
	case 1:
	default:
		s.TopP = x.topP
	}
	if x.typicalP != 1 {
		s.TypicalP = x.typicalP
	}
	return s
}

// refuseAll fails with ErrUnsupported if a field has a value other than null and the given values.
func (c *Config) refuseAll(fields map[string][]string) {
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		raw, ok := c.raw(name)
		c.ignore(name)
		if !ok || string(raw) == "null" {
			continue
		}
		value := strings.Join(strings.Fields(string(raw)), "")
		var number float64
		if json.Unmarshal(raw, &number) == nil { // 1.0 equals 1
			data, _ := json.Marshal(number)
			value = string(data)
		}
		if !slices.Contains(fields[name], value) {
			c.fail(ErrUnsupported, "%s is %q: tokens cannot be chosen this way", name, short(raw))
		}
	}
}
