package paper

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// check compares a value with a schema, as far as ours goes: a keyword that it does not know is an error.
func check(schema map[string]any, v any, at string) error {
	if want, ok := schema["type"]; ok {
		if err := checkType(want.(string), v); err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
	}
	for _, k := range slices.Sorted(maps.Keys(schema)) {
		want := schema[k]
		var err error
		switch k {
		case "$schema", "title", "description", "type":
		case "enum":
			if !slices.Contains(want.([]any), v) {
				err = fmt.Errorf("%v is none of %v", v, want)
			}
		case "pattern":
			if s, ok := v.(string); ok && !regexp.MustCompile(want.(string)).MatchString(s) {
				err = fmt.Errorf("%q does not match %s", s, want)
			}
		case "minLength":
			if s, ok := v.(string); ok && float64(len(s)) < want.(float64) {
				err = fmt.Errorf("%q is shorter than %v", s, want)
			}
		case "minimum":
			if f, ok := v.(float64); ok && !(f >= want.(float64)) {
				err = fmt.Errorf("%v is below %v", f, want)
			}
		case "required":
			for _, name := range want.([]any) {
				if _, there := v.(map[string]any)[name.(string)]; !there {
					return fmt.Errorf("%s: there is no %s", at, name)
				}
			}
		case "items":
			for i, x := range v.([]any) {
				if err := check(want.(map[string]any), x, fmt.Sprintf("%s[%d]", at, i)); err != nil {
					return err
				}
			}
		case "properties", "additionalProperties":
			err = checkProperties(schema, v, at)
		default:
			err = fmt.Errorf("the test knows no %q", k)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", at, err)
		}
	}
	return nil
}

func checkType(want string, v any) error {
	ok := false
	switch x := v.(type) {
	case string:
		ok = want == "string"
	case bool:
		ok = want == "boolean"
	case float64:
		ok = want == "number" || want == "integer" && x == math.Trunc(x)
	case []any:
		ok = want == "array"
	case map[string]any:
		ok = want == "object"
	}
	if !ok {
		return fmt.Errorf("%v is no %s", v, want)
	}
	return nil
}

func checkProperties(schema map[string]any, v any, at string) error {
	known, _ := schema["properties"].(map[string]any)
	for name, x := range v.(map[string]any) {
		of, ok := known[name].(map[string]any)
		if !ok {
			switch more := schema["additionalProperties"].(type) {
			case bool:
				if !more {
					return fmt.Errorf("there may be no %s", name)
				}
				continue
			case map[string]any:
				of = more
			}
		}
		if err := check(of, x, at+"."+name); err != nil {
			return err
		}
	}
	return nil
}

func checkJSON(data []byte) error {
	var schema map[string]any
	var v any
	if err := json.Unmarshal(Schema, &schema); err != nil {
		return err
	}
	if err := json.Unmarshal(data, &v); err != nil {
		return err
	}
	return check(schema, v, "report")
}

// TestSchema: what is committed fits, and what is wrong does not.
func TestSchema(t *testing.T) {
	names, err := filepath.Glob("../../../docs/benchmarks/paper-*.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := checkJSON(data); err != nil && !strings.Contains(name, "published") { // that one is by hand
			t.Errorf("%s: %v", name, err)
		}
	}
	good := measure.Report{
		Command: "paper", Date: "2026-11-26", Machine: measure.Machine{CPU: "Z80", Cores: 2, Workers: 1, Kernels: "go", Go: "go1.26", Load: 0.5},
		Figures: []measure.Figure{{Table: "Figure 7a", Case: "b1", Contender: "lean", Metric: measure.Micros, Value: 5}},
		Clocks:  []measure.Clock{{When: "before", SM: 1980, Memory: 2619}}, Versions: map[string]string{"driver": "570"},
	}
	for want, change := range map[string]func(r *measure.Report){
		"":                            func(*measure.Report) {},
		"there may be no transcribed": func(r *measure.Report) { r.Transcribed = "a page" },
		`"gpu" does not match`:        func(r *measure.Report) { r.Command = "gpu" },
		`"none" does not match`:       func(r *measure.Report) { r.Date = "none" },
		`"Shapes" does not match`:     func(r *measure.Report) { r.Figures[0].Table = "Shapes" },
		`"" is shorter than 1`:        func(r *measure.Report) { r.Figures[0].Case = "" },
		"-1 is below 0":               func(r *measure.Report) { r.Figures[0].Value = -1 },
		"0 is below 1":                func(r *measure.Report) { r.Machine.Cores = 0 },
		"is none of [before after]":   func(r *measure.Report) { r.Clocks[0].When = "later" },
		"is no array":                 func(r *measure.Report) { r.Figures = nil },
	} {
		r := good
		r.Figures, r.Clocks = slices.Clone(good.Figures), slices.Clone(good.Clocks)
		change(&r)
		data, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if err := checkJSON(data); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	if err := check(map[string]any{"oneOf": nil}, 1.0, "x"); err == nil {
		t.Error("an unknown keyword was taken")
	}
}
