// Package tiny has the small OPT model of this repository, as a Hugging Face folder, and the scripts that made it.
package tiny

import "embed"

// Files is the folder: what a decoder needs of it.
//
//go:embed config.json generation_config.json model.safetensors vocab.json merges.txt tokenizer_config.json special_tokens_map.json
var Files embed.FS
