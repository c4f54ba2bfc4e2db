// Package hf reads a Hugging Face folder of an OPT model: its config.json and
// its weights, as they are published.
//
// The weights may be in any of the four forms that such folders use. The first
// that is there is taken, in this order:
//
//	model.safetensors
//	model.safetensors.index.json   and the shards that it names
//	pytorch_model.bin              zip archive, or the older layout without zip
//	pytorch_model.bin.index.json   and the shards that it names
//
// Files are mapped into memory where the system can (elsewhere read once), and
// [Folder.Tensor] hands out weights in place, in the type that they are stored
// in. [Folder.Float32] widens those of 16 bits into new memory.
//
// # Names
//
// Callers use one name for a weight whatever the folder calls it: "decoder."
// and what follows, or "lm_head.weight". Published folders prefix the decoder's
// weights with "model.decoder.", "decoder." or nothing.
//
// # What would be left out
//
// A model of which a part is left out is another model, so [Open] refuses
//
//   - a tensor of these files that [Config.Weights] does not have, other than buffers
//     that follow from the configuration (rotary_emb.inv_freq, attn.bias,
//     attn.masked_bias), decoder.version, and a tied head that equals the embedding;
//   - a shard (model-00001-of-00002.safetensors) that the index does not list;
//   - an adapter: any file whose name begins with adapter_.
//
// Other files are not looked at.
//
// # Files from strangers
//
// Every offset, length, shape and name in a file is checked before it is used,
// and nothing is allocated for a size that the file only claims. A pickle is
// not executed: its reader knows the few instructions and the few classes that
// a dictionary of tensors needs, and refuses everything else. A shard is a file
// of the folder itself, never a path. Symbolic links are followed, because the
// hub's cache is made of them.
//
// # Settings
//
// Of config.json [Config] has what an OPT decoder is made of. Other keys there are
// irrelevant to OPT in transformers too (dropout and init_std are for training, dtype
// says how weights are stored, task_specific_params and prefix are for pipelines),
// but for those that would make another model or another text:
//
//	quantization_config, compression_config,   refused unless null, empty or false
//	pruned_heads, is_encoder_decoder,
//	add_cross_attention
//	repetition_penalty, no_repeat_ngram_size,  in config.json and generation_config.json refused unless they
//	bad_words_ids, suppress_tokens,            are null or what steers nothing: the words that follow would
//	forced_eos_token_id, num_beams,            not be those that transformers' generate writes
//	min_length and their like
//
// Of generation_config.json eos_token_id is honoured, a number or a list; where it is
// not there, config.json's is ([Folder.EOS]). How tokens are chosen (do_sample,
// temperature, top_k, top_p, min_p and their like), how many (max_length) and what
// generate gives back beside them is the caller's. Any other key is refused unless it
// is null or false.
//
// # Caveats
//
// Truncating a mapped file while it is in use ends the process, as with every
// mapping. The tokenizer's files are read by package decoder/tokenizer.
package hf
