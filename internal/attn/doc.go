// Package attn is the vocabulary of attention that all engines share: what a problem is (heads, element
// types, masks, changes of scores), which keys a query sees, how its rows lie in memory, and the errors
// that say what is wrong with one.
//
// It computes nothing. An engine takes a [Problem], asks [Problem.Check] whether it makes sense, and
// [Can.Do] whether the entry that was called can do all of it.
package attn
