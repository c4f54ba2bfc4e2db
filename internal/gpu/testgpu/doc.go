// Package testgpu is what tests of the GPU engine run on: the machine's GPU ([Real]), one
// that executes the kernels' PTX on the host ([Emulated]), or a driver that launches nothing
// and tells what it was asked for ([Fake]), so that a test can do a kernel's work. It also
// holds structs of Go against those of the kernels ([SameStruct]).
package testgpu
