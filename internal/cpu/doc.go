// Package cpu is what the packages in it compute with: engines, each a pool of threads that carries out tasks; the instruction sets of
// this machine, of which one is in use; how many threads a call is worth; and memory. It knows nothing of what is computed.
package cpu
