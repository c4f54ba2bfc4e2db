// Package hf reads the weights of a Hugging Face folder.
//
// The weights may be in four forms. The first that the folder has is read, in this order:
//
//	model.safetensors
//	model.safetensors.index.json   and the shards that the index names
//	pytorch_model.bin              zip archive, or the older layout without zip
//	pytorch_model.bin.index.json   and the shards that the index names
//
// Files are mapped into memory where the system can; elsewhere they are read once. [Folder.Tensor] returns weights in
// place, in their stored type.
//
// A weight's canonical name is its name in the file without the prefix "model.".
//
// Every offset, length, shape and name in a file is checked before use. Nothing is allocated for a size that a file only
// claims. A pickle is not executed: the reader knows the few instructions and classes that a dictionary of tensors needs,
// and refuses all others. A shard is a file of the folder, never a path. Symbolic links are followed, because the hub's
// cache is made of them.
//
// Truncating a mapped file while it is in use ends the process, as with every mapping.
package hf
