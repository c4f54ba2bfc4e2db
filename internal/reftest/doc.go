// Package reftest is the reference that kernels are tested against. It has attention in float64 over plain
// slices, an error bound for every element of the output, and inputs that reveal errors.
//
// A test makes a Case with New, which rounds the inputs to the types under test. The test copies the case
// into the layout under test, poisons the rest of the memory, runs the kernel, and passes the output to
// Compare with the result of Case.Reference. There is no tolerance to choose. The bound is derived from the
// case, see Precision.
//
// Inputs from N(0,1) alone hide errors. With 16 thousand keys, every weight is about 1/16384, and an output
// without a thousand of the keys still looks right. So each shape should be tested with all of Inputs.
package reftest
