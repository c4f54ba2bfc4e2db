// Package tiny holds the small OPT model that is part of this repository, as a
// Hugging Face folder. Beside it lies what it was made by.
package tiny

import "embed"

// Files is the folder: what a decoder needs of it.
//
//go:embed config.json model.safetensors vocab.json merges.txt
var Files embed.FS
