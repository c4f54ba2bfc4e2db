// Package attn has the types that describe attention to all engines: a problem (heads, masks, changes of scores), the format of pages, the keys
// that a query sees, the strides of rows, and errors.
//
// It computes nothing. An engine takes a [Problem], asks [Problem.Check] whether it makes sense, and
// [Can.Do] whether the entry that was called can do all of it.
package attn
