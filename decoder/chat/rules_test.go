package chat

import (
	"strings"
	"testing"
)

// TestRules compares the outputs of small templates with the outputs of testdata/rules.py. Each template tests a rule of Jinja or
// Python.
func TestRules(t *testing.T) {
	var rules [][2]*string
	load(t, "testdata/rules.json", &rules)
	texts := 0
	for _, rule := range rules {
		templates, err := New(map[string]string{"default": *rule[0]}, Options{})
		got := ""
		if err == nil {
			got, err = templates.Render(Conversation{Messages: []Message{{Role: "user", Content: "Hi"}}})
		}
		switch want := rule[1]; {
		case want == nil && err == nil:
			t.Errorf("%q: rendered to %q, and Python refuses it", *rule[0], got)
		case want == nil:
			if !strings.Contains(err.Error(), "line ") {
				t.Errorf("%q: refused without a place: %v", *rule[0], err)
			}
		case err != nil:
			t.Errorf("%q: %v", *rule[0], err)
		case got != *want:
			t.Errorf("%q: got %q, want %q", *rule[0], got, *want)
		default:
			texts++
		}
	}
	if texts < 200 {
		t.Errorf("%d texts compared, want 200 or more", texts)
	}
}
