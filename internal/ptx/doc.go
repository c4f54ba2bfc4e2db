// Package ptx runs GPU kernels on the host, from their PTX: slowly, and strictly.
// Tests of machines without a GPU execute the kernels by it.
//
// A thread has its own place in the program (independent thread scheduling): those
// of a warp that are at the same instruction execute it together, those behind go
// first, now and then others. Warps take turns in an order that the seed decides.
// What PTX leaves open is as unpleasant as it may be: a copy beside the arithmetic
// happens at any time until it is waited for; shared memory begins as NaN; what needs
// all threads of a warp waits for them.
//
// An error, with the instruction and its threads, is: an access outside of the
// memory that there is, or at an address that the type does not divide; an operand of
// a warp group's product that changes while the product is on its way; shared memory
// of a block that has ended; copies that nobody has waited for; threads that wait for
// each other for ever; an instruction that this package does not have. Launches run
// one after the other, but where they may overlap (programmatic dependent launch) it
// is an error to read what the one before writes, or to write what it reads or writes, before
// griddepcontrol.wait.
//
// Several GPUs run at once by [RunTogether], or in turns by [Start.Begin]. Stores to memory of another one arrive late and
// in any order, until something of the system scope orders them (peer.go).
//
// What is not modelled: weak ordering within a GPU (every write is seen by all at once), time
// (%globaltimer goes on, and fast where all threads wait), caches, and how the tensor core rounds its sums.
package ptx
