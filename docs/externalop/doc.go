// Package externalop holds the tests behind docs/external-op.md, which says how
// to write an operator for Gorgonia outside of Gorgonia. There is nothing to
// import here: one file has a complete operator, and the others show, a test for
// each claim, what Gorgonia v0.9.18 does with operators.
package externalop
