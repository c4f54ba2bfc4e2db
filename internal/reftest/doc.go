// Package reftest is what kernels are tested against: attention in float64 over
// plain slices, an error bound for every element of the output, and inputs that
// find errors.
//
// A test makes a Case with New (its inputs are already rounded to the types
// under test), copies it into the layout that it exercises, with the rest of
// the memory poisoned, runs the kernel, and hands the output to Compare together
// with Case.Reference. There is no slack to choose: the bound is derived from
// the case, see Precision.
//
// Inputs that are merely N(0,1) hide errors: at 16 thousand keys every weight is
// about 1/16384, and an output with a thousand keys missing still looks right.
// So each shape should meet all of Inputs.
package reftest
