// Package hf reads the weights of a Hugging Face folder.
//
// The weights may be stored in four forms. If a folder has several, the first in this list is read:
//
//	model.safetensors
//	model.safetensors.index.json   and the shards that the index names
//	pytorch_model.bin              zip archive, or the older layout without zip
//	pytorch_model.bin.index.json   and the shards that the index names
//
// Files are mapped into memory if the system supports mappings. On other systems, each file is read once.
// [Folder.Tensor] returns copies of weights, in their stored type.
//
// A weight's canonical name is its name in the file without the prefix "model.".
//
// Files are untrusted:
//
//   - Every offset, length, shape and name in a file is checked before use.
//   - Memory is allocated only for data that the file contains, not for a size that the file claims.
//   - Pickles are not executed. The reader supports only the instructions and classes that a dictionary of tensors
//     needs, and refuses all others.
//   - A shard is a file of the folder, never a path. Symbolic links are followed, because the hub's cache consists of
//     links.
//
// If another program cuts a mapped file, reading the file is an error. Tensors that were read before are copies, and stay
// as they are.
package hf
