// The random checkpoints of ../golden.py, for tests of examples/opt/model. They are a module without packages, so that the
// module above, which go get downloads, lacks them.
module gorgonia.org/leanattention/examples/opt/testdata/checkpoints

go 1.26.0
