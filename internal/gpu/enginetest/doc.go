// Package enginetest is what tests of the GPU engines run on: the machine's GPU ([Real]), one
// that executes the kernels' PTX on the host ([Emulated]), or a driver whose launches do nothing
// and are told to the test ([Fake], [Stub]). It also compares structs of Go with those of the
// kernels ([SameStruct]).
package enginetest
