// Package tiny holds the small OPT model that is part of this repository, as a
// Hugging Face folder. Beside it lies what it was made by.
package tiny

import "embed"

// Files is the folder: config.json, model.safetensors, vocab.json, merges.txt
// and what they were made by.
//
//go:embed *
var Files embed.FS
