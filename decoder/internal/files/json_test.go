package files

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// count returns the number of values and the depth of a JSON text, counted as Limits counts them. The text is parsed by
// encoding/json.
func count(data []byte) (values, depth int, nulls, ok bool) {
	if !json.Valid(data) {
		return 0, 0, false, false
	}
	d := json.NewDecoder(bytes.NewReader(data))
	at := 0
	var commas []int // number of keys and values so far, for each open array or object
	begin := func() {
		if n := len(commas); n > 0 {
			commas[n-1]++
		}
	}
	var objects []bool
	for {
		t, err := d.Token()
		if err != nil {
			return values, depth, nulls, true
		}
		switch t {
		case json.Delim('['), json.Delim('{'):
			begin()
			at++
			depth, values = max(depth, at), values+1
			commas, objects = append(commas, 0), append(objects, t == json.Delim('{'))
		case json.Delim(']'), json.Delim('}'):
			n := len(commas) - 1
			elements := commas[n]
			if objects[n] {
				elements /= 2
			}
			values += max(0, elements-1)
			commas, objects = commas[:n], objects[:n]
			at--
		default:
			begin()
			nulls = nulls || t == nil
		}
	}
}

func FuzzLimits(f *testing.F) {
	for _, s := range []string{
		`null`, `"null"`, `[]`, `{"a": [1, null, {"b\\\"": "n,[{"}], "c": {}}`, `[[[[]]]]`, `{"a": 1, "b": [true, false, "\\", "\"", "]"]}`, `"`, `"\`, `[`, `]]]]`, `{"a":null}`, ` [ 1 , 2 ] `,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		values, depth, nulls, ok := count(data)
		if !ok {
			_ = Limits{1, 1, false}.Check(data) // Check must return
			return
		}
		if err := (Limits{values, depth, nulls}).Check(data); err != nil {
			t.Fatalf("%q has %d values, %d deep, nulls %v: %v", data, values, depth, nulls, err)
		}
		for _, l := range []Limits{{values - 1, depth, nulls}, {values, depth - 1, nulls}, {values, depth, false}} {
			fits := l.Values >= values && l.Depth >= depth && (l.Nulls || !nulls)
			if err := l.Check(data); (err == nil) != fits && l.Values >= 0 && l.Depth >= 0 {
				t.Fatalf("%q has %d values, %d deep, nulls %v, with limits %+v: %v", data, values, depth, nulls, l, err)
			}
		}
	})
}

// TestLimits checks that a text of any size needs no memory, and time proportional to its size.
func TestLimits(t *testing.T) {
	l := Limits{1 << 20, 64, false}
	for what, c := range map[string]struct{ text, want string }{
		"deep":        {strings.Repeat("[", 32<<20), "more than 64 deep"},
		"many":        {"[" + strings.Repeat("1,", 16<<20), "more than 1048576 values"},
		"many arrays": {"[" + strings.Repeat("[]", 16<<20), "more than 1048576 values"},
		"a string":    {`"` + strings.Repeat(`\"[,n`, 6<<20), ""},
		"numbers":     {strings.Repeat("1 ", 16<<20), ""},
		"a null":      {`{"a": null}`, "byte 6: null"},
	} {
		began := time.Now()
		data := []byte(c.text)
		var err error
		allocs := testing.AllocsPerRun(1, func() { err = l.Check(data) })
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) || allocs > 10 || time.Since(began) > 5*time.Second {
			t.Errorf("%s: %v, %v allocations, %v", what, err, allocs, time.Since(began))
		}
	}
	if err := (Limits{1, 1, true}).Check([]byte("[null]")); err != nil {
		t.Error(err)
	}
}
