package files

import "fmt"

// Limits are the limits of a JSON text. A parser takes memory for each value, which may be two bytes of the text, and
// package encoding/json treats a null like a missing value.
type Limits struct {
	Values int  // in arrays and objects
	Depth  int  // of nested arrays and objects
	Nulls  bool // null may be among the values
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
		case 'n': // no other literal begins so
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
