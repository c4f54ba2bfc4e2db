package decoder

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
)

// Config reads the fields of a model's configuration one by one, and keeps the first error. A field that no call reads is
// an error of the model, unless the field is null or false, since the logits may depend on it.
type Config struct {
	file   string // name of the file, for errors
	object string // name of the object with a dot, for errors
	left   map[string]json.RawMessage
	read   map[string]json.RawMessage
	err    error

	packing *quantization // of the weights; nil: none

	context int // tokens of the longest text of the engine; 0: not known yet
}

// parseConfig begins to read an object.
func parseConfig(file, object string, data []byte) *Config {
	c := &Config{file: file, object: object, read: map[string]json.RawMessage{}}
	if err := json.Unmarshal(data, &c.left); err != nil {
		c.fail(ErrFormat, "no JSON object: %v", err)
	} else if c.left == nil {
		c.fail(ErrFormat, "no JSON object: null")
	}
	return c
}

// Err returns the first error.
func (c *Config) Err() error { return c.err }

// Context returns the number of tokens of the longest text that the network is for. Scalings of rotary embeddings may depend on
// that number. 0: no engine was made yet.
func (c *Config) Context() int { return c.context }

// Errorf makes an error of the file the first error, unless there is one.
func (c *Config) Errorf(format string, args ...any) { c.fail(ErrFormat, format, args...) }

func (c *Config) fail(kind error, format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf("decoder: %s: %s%s: %w", c.file, c.object, fmt.Sprintf(format, args...), kind)
	}
}

// refuse is the error of a value that is none of the known ones.
func (c *Config) refuse(name string, value any, known []string) {
	c.fail(ErrUnsupported, "%s is %s, none of %q", name, short(fmt.Appendf(nil, "%+q", value)), known)
}

// Has reports whether a field is present and not null.
func (c *Config) Has(name string) bool {
	raw, ok := c.raw(name)
	return ok && string(raw) != "null"
}

func (c *Config) raw(name string) (raw json.RawMessage, ok bool) {
	if raw, ok = c.left[name]; !ok {
		raw, ok = c.read[name]
	}
	return raw, ok
}

// Read reads a field into x, and reports whether the field is present. null counts as absent.
func (c *Config) Read(name string, x any) bool {
	raw, ok := c.raw(name)
	if ok {
		c.read[name] = raw
		delete(c.left, name)
	}
	if !ok || string(raw) == "null" {
		return false
	}
	if err := json.Unmarshal(raw, x); err != nil {
		c.fail(ErrFormat, "%s is %q: %.200v", name, short(raw), err) // err may have the whole number
	}
	return true
}

// Need reads a required field.
func (c *Config) Need(name string, x any) {
	if !c.Read(name, x) {
		c.fail(ErrMissing, "%s", name)
	}
}

// Size reads a number of things, in [1, 2^31 - 1), so that a product of two fits 64 bits. Without a default, or with one of 0, the
// field is required.
func (c *Config) Size(name string, otherwise ...int) int {
	n := int64(0)
	if !c.Read(name, &n) {
		if len(otherwise) > 0 && otherwise[0] > 0 {
			return otherwise[0]
		}
		c.fail(ErrMissing, "%s", name)
		return 1
	}
	if n < 1 || n >= math.MaxInt32 {
		c.fail(ErrFormat, "%s is %d, not in [1, %d)", name, n, math.MaxInt32)
		return 1
	}
	return int(n)
}

// Positive reads a finite number above 0. Without a default, or with one of 0, the field is required.
func (c *Config) Positive(name string, otherwise ...float64) float64 {
	var x float64
	if !c.Read(name, &x) {
		if len(otherwise) > 0 && otherwise[0] > 0 {
			return otherwise[0]
		}
		c.fail(ErrMissing, "%s", name)
		return 1
	}
	if !(x > 0) || math.IsInf(x, 1) {
		c.fail(ErrFormat, "%s is %v, not above 0", name, x)
		return 1
	}
	return x
}

// Optional reads a finite number above 0; 0: the field is absent or null.
func (c *Config) Optional(name string) float64 {
	if !c.Has(name) {
		c.ignore(name)
		return 0
	}
	return c.Positive(name)
}

// Flag reads a truth value.
func (c *Config) Flag(name string, otherwise bool) bool {
	c.Read(name, &otherwise)
	return otherwise
}

// Choice reads a string that is a key of known.
func (c *Config) Choice(name, otherwise string, known ...string) string {
	value := otherwise
	c.Read(name, &value)
	if !slices.Contains(known, value) {
		c.refuse(name, value, known)
		return otherwise
	}
	return value
}

// is refuses a field whose value is not the given one. An absent field has that value.
func (c *Config) is(name string, want any) {
	raw, ok := c.raw(name)
	c.ignore(name)
	if !ok || string(raw) == "null" {
		return
	}
	var got any
	if err := json.Unmarshal(raw, &got); err != nil || got != want {
		c.fail(ErrUnsupported, "%s is %q; known is %v", name, short(raw), want)
	}
}

// ignore marks fields that do not affect logits.
func (c *Config) ignore(names ...string) {
	for _, name := range names {
		if raw, ok := c.left[name]; ok {
			c.read[name] = raw
			delete(c.left, name)
		}
	}
}

// sub reads a field that is an object; nil: the field is absent or null.
func (c *Config) sub(name string) *Config {
	var raw json.RawMessage
	if !c.Read(name, &raw) || c.err != nil {
		return nil
	}
	return parseConfig(c.file, c.object+name+".", raw)
}

// end refuses fields that were not read.
func (c *Config) end() {
	for _, name := range slices.Sorted(maps.Keys(c.left)) {
		if raw := string(c.left[name]); raw != "null" && raw != "false" {
			c.fail(ErrUnsupported, "%q is %q, which is not known", short([]byte(name)), short(c.left[name]))
		}
	}
}

// short returns a value for errors.
func short(raw []byte) string {
	if len(raw) > 80 {
		return string(raw[:80]) + "..."
	}
	return string(raw)
}
