// Package cpu is the base of the packages below it: engines, each a pool of threads that run tasks; the instruction
// sets of this machine, of which one is in use; the number of threads that a call is worth; and memory. The package
// knows no layer.
package cpu
