//go:build !unix

package main

// stops does nothing: no shell here stops processes.
func (r *rawTerminal) stops(*keyboard, func()) (end func()) { return func() {} }
