//go:build !unix

package main

// stops does nothing: shells do not stop processes here.
func (r *rawTerminal) stops(*keyboard, func()) (end func()) { return func() {} }
