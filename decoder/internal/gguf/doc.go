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
// A file is mapped (package mapped), so opening reads the metadata and the infos alone, and tensors are decoded into
// memory of the caller. Files are untrusted: each count and length is compared with the bytes that follow before
// anything is allocated, and memory and time are in proportion to the file.
package gguf
