// Package library opens libraries of NVIDIA and calls their functions, without cgo.
package library
