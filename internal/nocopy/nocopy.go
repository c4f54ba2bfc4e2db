// Package nocopy refuses copies of structs that are used by their pointers alone.
package nocopy

// Mark is a field of a struct that must not be copied. go vet reports a copy of the struct (its check copylocks), and
// Problem finds a copy when a method is called on it, as strings.Builder does. The function that makes the struct calls
// Set, when the struct is where it stays.
type Mark struct{ self *Mark }

// Set notes where the struct is.
func (m *Mark) Set() { m.self = m }

// Problem says why a struct can't be used: no function in by has made it, or it is a copy. It is empty if the struct can
// be used.
func (m *Mark) Problem(what, by string) string {
	switch m.self {
	case m:
		return ""
	case nil:
		return Unmade(what, by)
	}
	return what + " is a copy of one: use the pointer that " + by + " gave"
}

// Unmade is the problem of a struct that no function in by has made, or of a nil pointer.
func Unmade(what, by string) string { return what + " was not made by " + by }

// Lock and Unlock do nothing. They are what go vet looks for.
func (*Mark) Lock()   {}
func (*Mark) Unlock() {}
