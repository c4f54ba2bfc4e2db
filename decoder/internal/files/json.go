package files

import "fmt"

// Limits are the limits of a JSON text. A parser allocates memory for each value, and a value may have only two bytes
// of text. Nulls is a limit because package encoding/json treats a null like a missing value.
type Limits struct {
	Values int  // elements of arrays and members of objects; an empty array or object counts as one
	Depth  int  // nesting depth of arrays and objects
	Nulls  bool // whether nulls are allowed
}

// Check returns an error if a JSON text exceeds the limits. Check does not detect invalid JSON.
func (l Limits) Check(data []byte) error {
	values, depth := 0, 0
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '"':
			for i++; i < len(data) && data[i] != '"'; i++ {
				if data[i] == '\\' {
					i++
				}
			}
		case '[', '{':
			values++
			if depth++; depth > l.Depth {
				return fmt.Errorf("byte %d: arrays and objects are nested more than %d deep", i, l.Depth)
			}
		case ']', '}':
			depth--
		case ',':
			values++
		case 'n': // null is the only literal that begins with n
			if !l.Nulls {
				return fmt.Errorf("byte %d: null has no place here", i)
			}
		}
		if values > l.Values {
			return fmt.Errorf("more than %d values", l.Values)
		}
	}
	return nil
}
