// Package gpu is what the parts of the GPU engine share: memory of a GPU and its
// element types, the modules with kernels, tensor maps, errors, and copies that are
// put off. Package attention computes attention with it, package decoder a decoder's
// other layers, of which some take attention into their launch. Package enginetest is
// what the tests of these packages run on.
package gpu
