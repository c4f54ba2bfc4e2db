// The random checkpoints of ../golden.py, for tests of package decoder. They are a module without packages, so that the
// module above, which go get downloads, lacks them.
module gorgonia.org/leanattention/decoder/testdata/opt/checkpoints

go 1.26.0
