// Package variant is a language for changes of attention's scores, and for masks: two Go expressions over the score,
// the positions of query and key, the numbers of head and sequence, parameters, and elements of tensors.
//
// A [Program] is such a pair of expressions, checked and typed. Engines compile a Program. [Program.ScoreAt] and
// [Program.SeesAt] are the reference. [Program.Range] bounds a value for ranges of positions, so that engines skip keys
// that no query sees, and so that no index of a tensor is out of range.
//
// Values are floats, ints of 32 bits, and bools:
//
//   - An int beside a float becomes a float. The sum of two ints wraps around.
//   - A quotient (/) is a float. div(a, b) is the quotient of ints, rounded down, and a % b its remainder.
//   - A parameter is an int if its number is one, and a float otherwise.
package variant
