// Package gguf reads GGUF, the file format of llama.cpp and ggml: versions 2 and 3, little endian.
//
//	magic      "GGUF"
//	version    uint32
//	counts     uint64 tensors, uint64 metadata keys
//	metadata   key, type, value, for each key
//	infos      name, dimensions, type, offset, for each tensor
//	data       from the next multiple of general.alignment
//
// The format's specification is at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
//
// A file is mapped into memory by package mapped. Opening a file reads only the metadata and the tensor infos. Tensors
// are decoded into memory of the caller.
//
// Files are untrusted. Each count and length is compared with the number of bytes left before anything is allocated.
// Memory and time are proportional to the file's size.
package gguf
