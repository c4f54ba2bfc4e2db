// What cmd/leanbench measured, and the pictures of docs/benchmarks.md and docs/paper.md. The folder is a module without
// packages, so that the module above, which go get downloads, lacks it.
module gorgonia.org/leanattention/docs/benchmarks

go 1.26.0
